"""From HAMi's device plugin to the agent under pods that run: none loses its share, or is oversold.

HAMi's plugin is a stand-in of ours; see lab/switch.py.
"""

import pytest

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.grants import environment_bytes, expected_inside, oversold, seen_inside
from tests.peers.lab.nodes import dies
from tests.peers.lab.placement import wall
from tests.peers.lab.pods import a_telling_pod, lives_of, run, run_shapes, until_settled, until_told
from tests.peers.lab.space import until, until_answer
from tests.peers.lab.switch import BACK, WITHIN, booked, hand_over, offers, promised, until_adopted

CACHE = "CUDA_DEVICE_MEMORY_SHARED_CACHE"


@pytest.mark.timeout(300)  # longer than what is waited for inside, which tells more
@pytest.mark.parametrize("manner", ["killed", "beside"])
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
