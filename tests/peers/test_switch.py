"""From HAMi's device plugin to the agent under pods that run: none loses its share, or is oversold.

HAMi's plugin is a stand-in of ours; see lab/hami_plugin.py.
"""

import pytest

from agent import cluster as annotations
from agent.allocate.edits import LOCK_DIRECTORY
from agent.model import GpuUuid
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.faults import dies
from tests.peers.lab.grants import (
    environment_bytes,
    expected_inside,
    grants,
    oversold,
    seen_inside,
    seen_mounts,
    told_environment,
)
from tests.peers.lab.node_state import (
    gpu_uuids,
    notes_of,
    until_allocatable,
    until_offered,
    until_unlocked,
)
from tests.peers.lab.placement import lock, now, place, share
from tests.peers.lab.pods import (
    PODS,
    a_telling_pod,
    as_seen,
    gpu_of,
    lives_of,
    run,
    run_shapes,
    until_failed,
    until_running,
    until_settled,
    until_told,
)
from tests.peers.lab.switch import (
    BACK,
    WITHIN,
    booked,
    hand_over,
    lock_directory,
    until_adopted,
)
from tests.peers.lab.waiting import until_answer
from tests.peers.lab.workloads import a_container, a_pod

LARGE = a_container(memory=21560)

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


async def test_a_new_pod_gets_no_more_than_what_those_before_leave(cluster, theirs):
    await run(cluster, a_telling_pod(cluster, "before", memory=60000))
    await until_settled(cluster, "before")
    (held,) = grants(as_seen(cluster, "before"))["main"]
    agent, _ = await hand_over(cluster, theirs)
    await until_adopted(cluster, agent, ["before"])

    gpu = gpu_uuids(cluster).index(GpuUuid(held.uuid))
    await place(cluster, a_pod("greedy", LARGE), [[share(cluster, gpu, memory=21560)]])

    assert "[HA-4003]" in (await until_failed(cluster, "greedy"))["message"]
    await until_unlocked(cluster)
    await place(cluster, a_pod("modest", LARGE), [[share(cluster, gpu, memory=21559)]])
    await until_running(cluster, "modest")


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


async def test_the_lock_of_a_pod_that_it_left_halfway_is_released(cluster, theirs):
    await run(cluster, a_telling_pod(cluster, "halfway"))
    await until_settled(cluster, "halfway")
    await theirs.kill()
    noted = notes_of(as_seen(cluster, "halfway"))
    unsettled = {
        annotations.TO_ALLOCATE: noted[annotations.ALLOCATED],
        annotations.BIND_PHASE: annotations.PHASE_ALLOCATING,
    }
    await cluster.api.patch(f"{PODS}/halfway", {"metadata": {"annotations": unsettled}})
    await lock(cluster, "halfway", age=float(now().timestamp()) - int(noted[annotations.BIND_TIME]))

    agent = await cluster.start_agent()
    await until_adopted(cluster, agent, ["halfway"])

    await until_unlocked(cluster)
    await run(cluster, a_telling_pod(cluster, "next"))
    assert expected_inside(cluster, "next") == await seen_inside(cluster, "next")


async def test_slices_that_are_held_stay_listed_when_the_agent_has_fewer(cluster, theirs):
    names = await run(cluster, *(a_telling_pod(cluster, f"one-{number}") for number in range(3)))
    await until_settled(cluster, *names)
    held = frozenset().union(*(await cluster.kubelet.held(RESOURCE)).values())
    gpus = len({gpu_of(text) for text in held})
    await theirs.stop()

    agent = await cluster.start_agent("--split-count", "1")
    await until_adopted(cluster, agent, names)

    async def are_listed():
        return held <= (await cluster.kubelet.offered(RESOURCE) or frozenset())

    await until_answer(are_listed, WITHIN, agent.part.tail)
    await until_offered(cluster, 8 - gpus + len(held))
