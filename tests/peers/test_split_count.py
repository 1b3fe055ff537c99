"""Fewer slices than are held: pods keep theirs and run on, and what they leave is not listed again.

A slice is given up when its pod is gone for a minute.
"""

import asyncio

import pytest

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.agreement import disagreement, lost, rows
from tests.peers.lab.clockwork import REGISTERED, kubelet_said, wall
from tests.peers.lab.config_files import NODE_CONFIG, node_config
from tests.peers.lab.faults import end_container
from tests.peers.lab.node_state import until_allocatable
from tests.peers.lab.placement import place, share
from tests.peers.lab.pods import (
    delete,
    key,
    lives_of,
    run,
    until_deleted,
    until_restarted,
    until_running,
    until_settled,
)
from tests.peers.lab.report import Told, node_writes, until_node_writes, until_told
from tests.peers.lab.requests import mark_of_rest
from tests.peers.lab.settings import BOUND, QUIET, ask_to_reload, with_node_config
from tests.peers.lab.table import FAR
from tests.peers.lab.waiting import until, until_answer
from tests.peers.lab.workloads import a_pod

CLOSED = 60.0
"""Seconds for which a row outlives its pod."""

NAMES = ("resident-0", "resident-1", "resident-2")


async def three_on_one_gpu(cluster, agent):
    """Three pods which hold a slice of the first GPU each; the ids by pod."""
    for name in NAMES:
        await place(cluster, a_pod(name), [[share(cluster, 0)]])
        await until_running(cluster, name)
        await until_settled(cluster, name)
    await until(lambda: len(NAMES) == len(agent.events("lock.released")), 10.0, agent.part.tail)
    await until(lambda: are_confirmed(cluster), 30.0, agent.part.tail)
    return await held_by(cluster, *NAMES)


def are_confirmed(cluster):
    """Whether the agent knows of all rows that the kubelet has them, which it looks up later."""
    return all(one.confirmed for one in rows(cluster).values())


async def held_by(cluster, *names):
    """The ids that the kubelet has given to those pods."""
    held = await cluster.kubelet.held(RESOURCE)
    return {name: held[key(name), "main"] for name in names}


async def lower(cluster, agent, files):
    """One slice per GPU from now on; when that was said, by the loop's clock."""
    began = asyncio.get_running_loop().time()
    files.write(NODE_CONFIG, node_config(devicesplitcount=1))
    ask_to_reload(agent)
    await until_allocatable(cluster, 3 + 7, FAR * BOUND)
    return began


def all_of(held):
    """The ids of all those pods."""
    return frozenset().union(*held.values())


async def test_held_slices_stay_when_there_are_fewer_and_their_containers_start_again(
    cluster, table
):
    agent, files = await with_node_config(cluster, 10)
    held = await three_on_one_gpu(cluster, agent)
    before, booked = lives_of(cluster, NAMES), rows(cluster)
    mark, since = await mark_of_rest(cluster), wall()

    began = await lower(cluster, agent, files)
    took = asyncio.get_running_loop().time() - began
    table.hold("split count below the held slices → they alone are left", took, BOUND)
    await until_told(cluster, Told(8, 1), began, FAR * BOUND)
    assert all_of(held) <= await cluster.kubelet.allocatable(RESOURCE)
    assert booked == rows(cluster)

    dies, *others = NAMES
    await end_container(before[dies]["main"].id)
    await until_restarted(cluster, dies)
    assert {one: before[one] for one in others} == lives_of(cluster, others)
    assert held == await held_by(cluster, *NAMES)
    await asyncio.sleep(QUIET)  # what is claimed is about this time
    assert 1 == node_writes(cluster, mark)
    assert [] == kubelet_said(cluster, REGISTERED, since=since)
    assert {} == await disagreement(cluster)


async def test_a_kubelet_that_starts_again_while_slices_drain_keeps_the_pods(cluster):
    agent, files = await with_node_config(cluster, 10)
    held = await three_on_one_gpu(cluster, agent)
    before = lives_of(cluster, NAMES)
    await lower(cluster, agent, files)

    await cluster.kubelet.restart()
    await until_allocatable(cluster, 3 + 7)

    async def is_agreed():
        return {} == await disagreement(cluster)

    await until_answer(is_agreed, 30.0, agent.part.tail)
    await place(cluster, a_pod("new"), [[share(cluster, 1)]])
    await until_running(cluster, "new")
    assert before == lives_of(cluster, NAMES)
    assert held == await held_by(cluster, *NAMES)
    assert [] == lost(cluster)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_slices_shrink_as_their_pods_end_without_another_write_to_the_node(cluster, table):
    agent, files = await with_node_config(cluster, 10)
    held = await three_on_one_gpu(cluster, agent)
    mark = await mark_of_rest(cluster)
    await lower(cluster, agent, files)
    await until_node_writes(cluster, mark, 1)
    lists = len(agent.events("list.changed"))

    loop = asyncio.get_running_loop()
    gone = {}
    for name in NAMES:
        await delete(cluster, name)
        await until_deleted(cluster, name)
        gone[name] = loop.time()
        await asyncio.sleep(QUIET)  # so that each is given up by itself
    for name, left in zip(NAMES, (2 + 7, 1 + 7, 1 + 7), strict=True):
        held.pop(name)

        async def is_given_up(name=name):
            return (key(name), "main") not in rows(cluster)

        await until_answer(is_given_up, CLOSED + FAR * BOUND, agent.part.tail)
        await until_allocatable(cluster, left, FAR * BOUND)
        table.hold("a pod ends → its slice is given up", loop.time() - gone[name], CLOSED + BOUND)
        assert all_of(held) <= await cluster.kubelet.allocatable(RESOURCE)
    await asyncio.sleep(QUIET)  # what is claimed is about this time

    assert 1 == node_writes(cluster, mark)
    assert len(agent.events("list.changed")) - lists in {2, 3}
    assert {} == rows(cluster)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_after_a_change_a_minute_with_pods_is_without_a_write(cluster):
    agent, files = await with_node_config(cluster, 10)
    names = await run(cluster, *(a_pod(name) for name in NAMES))
    await until_settled(cluster, *names)
    began = asyncio.get_running_loop().time()
    files.write(NODE_CONFIG, node_config(devicesplitcount=4))
    ask_to_reload(agent)
    await until_told(cluster, Told(8, 4), began, FAR * BOUND)
    await asyncio.sleep(QUIET)

    mark = cluster.plane.audit.mark()
    await asyncio.sleep(60.0)  # what is claimed is about this time

    assert 0 == node_writes(cluster, mark)
