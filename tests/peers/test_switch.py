"""From HAMi's device plugin to the agent under pods that run: none loses its share, or is oversold.

HAMi's plugin is a stand-in of ours; see lab/switch.py.
"""

import asyncio

import pytest

from agent.allocate.edits import LOCK_DIRECTORY
from agent.reconcile import PERIOD
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.cluster import ACCOUNT
from tests.peers.lab.grants import (
    environment_bytes,
    expected_inside,
    oversold,
    seen_inside,
    seen_mounts,
    told_environment,
)
from tests.peers.lab.node_state import until_allocatable
from tests.peers.lab.nodes import dies
from tests.peers.lab.placement import wall
from tests.peers.lab.pods import a_telling_pod, lives_of, run, run_shapes, until_settled, until_told
from tests.peers.lab.space import until, until_answer
from tests.peers.lab.switch import (
    BACK,
    WITHIN,
    booked,
    hand_over,
    lock_directory,
    offers,
    promised,
    until_adopted,
)

CACHE = "CUDA_DEVICE_MEMORY_SHARED_CACHE"


@pytest.mark.timeout(300)  # longer than what is waited for inside, which tells more
@pytest.mark.parametrize("manner", ["stopped", "killed", "beside"])
async def test_pods_run_on_and_the_agent_has_their_shares(cluster, theirs, table, manner):
    names = await run_shapes(cluster)
    before, held = lives_of(cluster, names), await cluster.kubelet.held(RESOURCE)
    slices = await cluster.kubelet.allocatable(RESOURCE)

    agent, away = await hand_over(cluster, theirs, manner)
    table.hold(f"switch from HAMi's plugin, {manner} → allocatable back", away, BACK)
    await until_adopted(cluster, agent, names)

    assert slices == await cluster.kubelet.allocatable(RESOURCE)
    assert held == await cluster.kubelet.held(RESOURCE) == booked(cluster)[1]
    new = await run(cluster, a_telling_pod(cluster, "new", gpus=2))
    assert expected_inside(cluster, "new") == await seen_inside(cluster, "new")
    await until_settled(cluster, *new)
    assert before == lives_of(cluster, names)
    assert {} == oversold(cluster)
    assert [] == agent.events("ledger.mismatch") + agent.events("ledger.kept_unread")


def told(cluster, name):
    """What a container was told and sees, without its cache file's name; and where its lock is."""
    environment = told_environment(cluster, name)
    mounts = seen_mounts(cluster, name)
    mounted = mounts.pop(LOCK_DIRECTORY)
    return (environment | {CACHE: ""}, mounts), mounted


async def test_a_container_that_dies_starts_again_as_it_was(cluster, theirs):
    await run(cluster, a_telling_pod(cluster, "first", gpus=2), a_telling_pod(cluster, "second"))
    await until_settled(cluster, "first", "second")
    await until_told(cluster, "first", "second")
    environment, (inside, before) = environment_bytes(cluster, "first"), told(cluster, "second")
    agent, _ = await hand_over(cluster, theirs)
    await until_adopted(cluster, agent, ["first", "second"])

    await dies(cluster, "first")

    # The kubelet kept HAMi's answer.
    assert environment == environment_bytes(cluster, "first")
    assert [] == agent.events("alloc.answered")

    await cluster.kubelet.restart(lose_checkpoint=True)
    await until_allocatable(cluster)
    await dies(cluster, "second")

    assert ["replay"] == [one["result"] for one in agent.events("alloc.answered")]
    assert lock_directory(cluster) == before.source
    own = inside[1]["/usr/local/vgpu"]
    assert (inside, own) == told(cluster, "second")
    assert {} == oversold(cluster)


# HAMi's device plugin beside the agent, and the way back to it, as it is and as it goes wrong.


async def test_beside_it_the_agent_refuses_to_serve_and_disturbs_nobody(cluster, theirs):
    await run(cluster, a_telling_pod(cluster, "served"))
    await until_settled(cluster, "served")

    agent = await cluster.start_agent(user=ACCOUNT)
    async with asyncio.timeout(WITHIN):
        assert 78 == await agent.part.wait()

    (failed,) = agent.events("agent.failed")
    assert "nvidia-gpu.sock: take it off the node (HAMi's: the DaemonSet" in failed["err"]
    assert "[PluginConflict]" in failed["err"]
    assert await offers(cluster, 80)
    await run(cluster, a_telling_pod(cluster, "later"))
    await until_settled(cluster, "later")
    assert ["served", "later"] == theirs.pods


async def test_one_that_comes_beside_the_agent_is_told_and_outlived(cluster, theirs):
    await theirs.stop()
    agent = await cluster.start_registered_agent()
    await theirs.start()
    await until(lambda: bool(agent.events("registration.rival")), WITHIN, agent.part.tail)
    await run(cluster, a_telling_pod(cluster, "theirs"))
    await until_settled(cluster, "theirs")
    assert ["theirs"] == theirs.pods

    await theirs.kill()

    # Up to kubelet 1.36 it takes the resource with it, and the agent's stream stays open.
    await until(lambda: bool(agent.events("registration.rival_gone")), WITHIN, agent.part.tail)
    await until_allocatable(cluster)
    await until_adopted(cluster, agent, ["theirs"], within=PERIOD + WITHIN)  # by the next List
    await run(cluster, a_telling_pod(cluster, "ours"))
    assert ["ours"] == [one["pod"] for one in agent.events("alloc.answered")]


async def test_the_way_back_loses_nothing_either(cluster, theirs, table):
    before = await run(cluster, a_telling_pod(cluster, "hami-1"))
    await until_settled(cluster, *before)
    agent, _ = await hand_over(cluster, theirs)
    await until_adopted(cluster, agent, before)
    ours = await run(cluster, a_telling_pod(cluster, "ours-1"), a_telling_pod(cluster, "ours-2"))
    await until_settled(cluster, *ours)
    await until_told(cluster, *ours)
    living, held = lives_of(cluster, [*before, *ours]), await cluster.kubelet.held(RESOURCE)

    began = wall()
    await agent.part.stop()
    await theirs.start()
    await until_answer(lambda: offers(cluster, 80), WITHIN, theirs.tail)
    table.hold("switch back to HAMi's plugin → allocatable back", wall() - began, BACK)
    await run(cluster, a_telling_pod(cluster, "hami-2"))
    await until_settled(cluster, "hami-2")

    assert living == lives_of(cluster, [*before, *ours])
    assert held.items() <= (await cluster.kubelet.held(RESOURCE)).items()
    assert ["hami-1", "hami-2"] == theirs.pods
    inside = environment_bytes(cluster, "ours-1")
    await dies(cluster, "ours-1")
    assert inside == environment_bytes(cluster, "ours-1")
    # To the agent again, which has rows of the time before.
    agent, _ = await hand_over(cluster, theirs)
    wanted = promised(cluster, ["hami-1", "hami-2", "ours-1", "ours-2"])
    await until(lambda: wanted == booked(cluster)[0], WITHIN, agent.part.tail)
    assert {} == oversold(cluster)
