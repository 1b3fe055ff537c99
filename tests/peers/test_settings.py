"""What other settings do to pods and to the node, while the agent runs."""

import asyncio

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.grants import disagreement, lost, rows, told_environment
from tests.peers.lab.node_state import (
    Told,
    forget_events,
    gpu_uuids,
    node_events,
    node_of,
    node_writes,
    registered,
    registered_health,
    until_allocatable,
    until_node_events,
    until_node_writes,
)
from tests.peers.lab.node_state import until_told as until_node_told
from tests.peers.lab.nodes import end_container
from tests.peers.lab.placement import REGISTERED, kubelet_said, place, share, wall
from tests.peers.lab.pods import (
    a_pod,
    a_telling_pod,
    gpu_of,
    key,
    lives_of,
    run,
    until_restarted,
    until_running,
    until_settled,
    until_told,
)
from tests.peers.lab.requests import mark_of_rest
from tests.peers.lab.settings import (
    ALL,
    BOUND,
    NODE_CONFIG,
    QUIET,
    ask_to_reload,
    node_config,
    until_everywhere,
    with_node_config,
)
from tests.peers.lab.space import until, until_answer
from tests.peers.lab.table import FAR

SCHEDULED = 15.0
"""Seconds between two looks of HAMi's scheduler."""

LEFT_OUT = "GpuLeftOut"


async def test_memory_beyond_a_gpus_own_can_be_had_once_it_is_scaled(cluster, table):
    agent, files = await with_node_config(cluster, 10)
    before = await run(cluster, a_telling_pod(cluster, "before"))
    await until_settled(cluster, *before)
    lived = lives_of(cluster, before)

    files.write(NODE_CONFIG, node_config(devicememoryscaling=1.5, libcudaloglevel="4"))
    ask_to_reload(agent)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await run(cluster, a_telling_pod(cluster, "after", memory=120_000), within=60.0)
    table.hold("memory scaled → a pod with 120 GB runs", loop.time() - began, BOUND + SCHEDULED)

    await until_told(cluster, "before", "after")
    old, new = (told_environment(cluster, name) for name in ("before", "after"))
    assert ("120000m", "true", "4") == (
        new["CUDA_DEVICE_MEMORY_LIMIT_0"],
        new["CUDA_OVERSUBSCRIBE"],
        new["LIBCUDA_LOG_LEVEL"],
    )
    assert "CUDA_OVERSUBSCRIBE" not in old
    assert "1" == old["LIBCUDA_LOG_LEVEL"]
    assert lived == lives_of(cluster, before)
    assert [] == agent.events("alloc.refused")


async def test_gpus_that_cannot_be_shared_in_a_mode_are_offered_again_in_another(cluster, table):
    agent, files = await with_node_config(cluster, 10)
    await forget_events(cluster, LEFT_OUT)
    mark, since, gpus = await mark_of_rest(cluster), wall(), gpu_uuids(cluster)

    files.write(NODE_CONFIG, node_config(operatingmode="mig"))
    await until_allocatable(cluster, 0, FAR * BOUND)
    await until_health(cluster, dict.fromkeys(gpus, False))
    await until_node_writes(cluster, mark, 1)
    assert frozenset() == await cluster.kubelet.allocatable(RESOURCE)
    files.write(NODE_CONFIG, node_config(operatingmode="mps"))
    await until_allocatable(cluster, 80, FAR * BOUND)
    await until_health(cluster, dict.fromkeys(gpus, True))
    await until_node_writes(cluster, mark, 2)
    await until_node_events(cluster, LEFT_OUT, len(gpus))
    await asyncio.sleep(QUIET)  # what is claimed is about this time

    assert {"mps"} == {gpu["mode"] for gpu in registered(node_of(cluster))}
    assert 2 == node_writes(cluster, mark)
    assert len(gpus) == len(await node_events(cluster, LEFT_OUT))
    assert [] == kubelet_said(cluster, REGISTERED, since=since)
    assert [] == agent.events("config.rejected")


async def until_health(cluster, wanted):
    """Return once the Node says so of its GPUs. Raises TimeoutError."""
    await cluster.nodes.until(
        lambda: wanted == registered_health(node_of(cluster)), FAR * BOUND, f"not {wanted}"
    )


# HAMi's settings files under a running agent: what an edit says, kubelet and scheduler learn.


async def test_an_edit_of_the_nodeconfig_reaches_kubelet_and_scheduler(cluster, table):
    agent, files = await with_node_config(cluster, 10)
    loop = asyncio.get_running_loop()
    mark, since = await mark_of_rest(cluster), wall()
    first, *_, last = gpu_uuids(cluster)
    edits: list[tuple[Told, dict[str, object]]] = [
        (Told(8, 4), {"devicesplitcount": 4}),
        (Told(8, 12, 122338), {"devicesplitcount": 12, "devicememoryscaling": 1.5}),
        (
            Told(6, 3, 81559, 114),
            {
                "devicesplitcount": 3,
                "devicecorescaling": 1.15,
                "filterdevices": {"uuid": [first], "index": [7]},
            },
        ),
        (ALL, {}),
    ]

    for count, (wanted, entry) in enumerate(edits, start=1):
        began = loop.time()
        files.write(NODE_CONFIG, node_config(**entry))
        ask_to_reload(agent)
        await until_everywhere(cluster, table, wanted, began, "config.json edited")
        await until_node_writes(cluster, mark, count)
        if wanted.gpus == 6:
            offered = {gpu_of(text) for text in await cluster.kubelet.allocatable(RESOURCE)}
            assert offered == {one["id"] for one in registered(node_of(cluster))}
            assert {first, last}.isdisjoint(offered)
    await asyncio.sleep(QUIET)  # what is claimed is about this time

    assert len(edits) == node_writes(cluster, mark)
    assert [] == kubelet_said(cluster, REGISTERED, since=since)


# Fewer slices than are held: pods keep theirs and run on.


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
    await until_node_told(cluster, Told(8, 1), began, FAR * BOUND)
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
