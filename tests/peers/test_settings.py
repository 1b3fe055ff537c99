"""What other settings do to pods and to the node, while the agent runs."""

import asyncio
import json
import os
import sys

import pytest
import pytest_asyncio

from tests.peers.lab.agents import RESOURCE, SOURCE
from tests.peers.lab.grants import disagreement, lost, rows, told_environment
from tests.peers.lab.identities import NODE, NODE_USER
from tests.peers.lab.node_state import (
    NODE_PATH,
    Told,
    forget_events,
    gpu_uuids,
    node_events,
    node_of,
    node_writes,
    register_text,
    registered,
    registered_health,
    until_allocatable,
    until_node_event,
    until_node_events,
    until_node_writes,
)
from tests.peers.lab.node_state import until_told as until_node_told
from tests.peers.lab.nodes import end_container
from tests.peers.lab.placement import REGISTERED, kubelet_said, place, share, wall
from tests.peers.lab.pods import (
    a_pod,
    a_telling_pod,
    delete,
    gpu_of,
    key,
    lives_of,
    run,
    until_deleted,
    until_restarted,
    until_running,
    until_settled,
    until_told,
)
from tests.peers.lab.pods import until_told as until_pods_told
from tests.peers.lab.requests import mark_of_rest
from tests.peers.lab.settings import (
    ALL,
    BOUND,
    DEVICE_CONFIG,
    NODE_CONFIG,
    QUIET,
    ask_to_reload,
    node_config,
    open_files,
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

REJECTED = "ConfigRejected"
BAD_SETTINGS = 78


async def test_an_edit_of_the_nodeconfig_reaches_kubelet_and_scheduler(cluster, table):
    _, files = await with_node_config(cluster, 10)
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
        await until_everywhere(cluster, table, wanted, began, "config.json edited")
        await until_node_writes(cluster, mark, count)
        if wanted.gpus == 6:
            offered = {gpu_of(text) for text in await cluster.kubelet.allocatable(RESOURCE)}
            assert offered == {one["id"] for one in registered(node_of(cluster))}
            assert {first, last}.isdisjoint(offered)
    await asyncio.sleep(QUIET)  # what is claimed is about this time

    assert len(edits) == node_writes(cluster, mark)
    assert [] == kubelet_said(cluster, REGISTERED, since=since)


BROKEN = [
    pytest.param('{"nodeconfig": [{"name": "node-a", "devicesplitc', id="half-written"),
    pytest.param(node_config(devicesplitcount=9000), id="too-great-a-list"),
    pytest.param(None, id="removed"),
]


def spoil(files, broken):
    """Write a broken file, or remove the one that is there."""
    if broken is None:
        files.remove(NODE_CONFIG)
    else:
        files.write(NODE_CONFIG, broken)


@pytest.mark.parametrize("broken", BROKEN)
async def test_a_broken_file_changes_nothing_until_it_is_mended(cluster, table, broken):
    await forget_events(cluster, REJECTED)
    agent, files = await with_node_config(cluster, 4)
    mark, text = await mark_of_rest(cluster), register_text(cluster)

    spoil(files, broken)
    event = await until_node_event(cluster, REJECTED)
    assert "Warning" == event["type"]
    assert str(files.directory / NODE_CONFIG) in event["message"]
    assert 32 == len(await cluster.kubelet.allocatable(RESOURCE))
    assert text == register_text(cluster)

    began = asyncio.get_running_loop().time()
    files.write(NODE_CONFIG, node_config(devicesplitcount=5))
    await until_everywhere(cluster, table, Told(8, 5), began, "config.json mended")
    await until_node_writes(cluster, mark, 1)
    assert 1 == node_writes(cluster, mark)
    assert 1 == len(agent.events("config.rejected"))
    assert 1 == len(await node_events(cluster, REJECTED))


async def test_a_first_start_with_a_broken_file_ends_with_78_and_touches_nothing(cluster):
    files = open_files(cluster)
    path = files.write(NODE_CONFIG, "{")
    mark, since = cluster.plane.audit.mark(), wall()

    agent = await cluster.start_agent("--nodeconfig", str(path))
    async with asyncio.timeout(20.0):
        assert BAD_SETTINGS == await agent.part.wait()

    assert f"{path}:1:" in agent.part.said()
    assert [] == cluster.plane.audit.since(mark, NODE_USER)
    assert [] == kubelet_said(cluster, REGISTERED, since=since)


RELEASE = """
nvidia:
  resourceCountName: nvidia.com/gpu
  resourceMemoryName: nvidia.com/gpumem
  resourceMemoryPercentageName: nvidia.com/gpumem-percentage
  resourceCoreName: nvidia.com/gpucores
  resourcePriorityName: nvidia.com/priority
  overwriteEnv: false
  defaultMemory: 0
  defaultCores: 0
  defaultGPUNum: 1
  memoryFactor: 1
  deviceSplitCount: 5
  deviceMemoryScaling: 1.8
  deviceCoreScaling: 1.15
  gpuCorePolicy: default
  libCudaLogLevel: 3
  runtimeClassName: ""
  knownMigGeometries:
    - models: ["A30"]
      allowedGeometries:
        - - name: 1g.6gb
            core: 25
            memory: 6144
            count: 4
cambricon:
  resourceCountName: cambricon.com/vmlu
hygon:
  resourceCountName: hygon.com/dcunum
"""
"""HAMi's device-config.yaml with keys of its chart; other vendors' sections are in it, too."""


async def checked(*files):
    """What `hami-agent config check` says that this node gets, by key, where something said so."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agent", "config", "check", *map(str, files)),
        *("--node", NODE, "-o", "json"),
        stdout=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": str(SOURCE), "PATH": os.defpath},
    )
    said, _ = await process.communicate()
    assert 0 == process.returncode
    (node,) = json.loads(said)["data"]["nodes"]
    assert NODE == node["name"]
    return {one["key"]: (one["value"], one["origin"]) for one in node["settings"]}


async def test_the_files_of_a_hami_release_give_what_config_check_prints(cluster):
    files = open_files(cluster)
    device = files.write(DEVICE_CONFIG, RELEASE)
    entry = {
        "operatingmode": "hami-core",
        "devicememoryscaling": 1.5,
        "devicesplitcount": 0,
        "migstrategy": "none",
        "filterdevices": {"uuid": [], "index": [6, 7]},
    }
    node = files.write(NODE_CONFIG, node_config(**entry))
    found = await checked(device, node)

    wanted = {
        "sharing.splitCount": 5,
        "sharing.memoryScaling": 1.5,
        "sharing.coreScaling": 1.15,
        "sharing.filterIndexes": ["6", "7"],
        "library.cudaLogLevel": "3",
    }
    values = {key: value for key, (value, _) in found.items()}
    assert wanted == {key: values[key] for key in wanted}
    assert found["sharing.memoryScaling"][1].startswith(f"{node}:")
    assert found["sharing.splitCount"][1].startswith(f"{device}:")

    flags = ("--device-config", str(device), "--nodeconfig", str(node))
    await cluster.start_registered_agent(*flags, slices=6 * 5)
    wanted_gpus = [
        {
            "index": index,
            "count": 5,
            "devmem": int(81559 * 1.5),
            "devcore": int(1.15 * 100),
            "type": "NVIDIA H100 80GB HBM3",
            "numa": index // 4,
            "mode": "hami-core",
            "health": True,
        }
        for index in range(6)
    ]
    said = [
        {key: one[key] for key in one if key != "id"}
        | {"type": one["type"].removeprefix("NVIDIA-")}
        for one in registered(node_of(cluster))
    ]
    # Zeros are left out of the newer form, and the older one has `NVIDIA-` before every name.
    assert said == [
        {key: one[key] for key in told} for one, told in zip(wanted_gpus, said, strict=True)
    ]
    assert {"count", "devmem", "devcore", "type", "health"} <= said[0].keys()

    # By hand: HAMi's scheduler may not have read yet that two GPUs are out.
    await place(cluster, a_telling_pod(cluster, "inside"), [[share(cluster, 0)]])
    await until_pods_told(cluster, "inside")
    told = told_environment(cluster, "inside")
    assert "3" == told["LIBCUDA_LOG_LEVEL"]
    assert "true" == told["CUDA_OVERSUBSCRIBE"]


# Profiles of the agent's own file: the labels of the Node choose, also while the agent runs.

OWN_FILE = """
sharing:
  splitCount: 10
profiles:
  - name: narrow
    match: {labels: "pool in (small, tiny)"}
    sharing: {splitCount: 3}
  - name: heavy
    match: {labels: "pool=tiny,!big"}
    sharing: {memoryScaling: 2}
"""


async def label(cluster, **labels):
    """Set labels of the Node, or remove those that are None."""
    await cluster.api.patch(NODE_PATH, {"metadata": {"labels": labels}})


@pytest_asyncio.fixture(loop_scope="session")
async def own_file(cluster):
    """The agent's own file with profiles; the Node has no label of theirs, neither afterwards."""
    yield open_files(cluster).write("config.yaml", OWN_FILE)
    await label(cluster, pool=None, big=None, unrelated=None)


async def test_labels_of_the_node_choose_profiles_from_the_first_report_on(
    cluster, table, own_file
):
    await label(cluster, pool="small")
    mark = cluster.plane.audit.mark()
    await cluster.start_registered_agent("--config", str(own_file), slices=24)
    await until_node_told(cluster, Told(8, 3), 0.0, 10.0)
    await until_node_writes(cluster, mark, 1)
    loop, since = asyncio.get_running_loop(), wall()
    steps: list[tuple[Told, dict[str, str | None]]] = [
        (Told(8, 3, 163118), {"pool": "tiny"}),
        (Told(8, 3), {"big": ""}),
        (ALL, {"pool": None, "big": None}),
    ]

    for count, (wanted, labels) in enumerate(steps, start=2):
        began = loop.time()
        await label(cluster, **labels)
        await until_everywhere(cluster, table, wanted, began, "Node labelled")
        await until_node_writes(cluster, mark, count)
    await label(cluster, unrelated="x")
    await asyncio.sleep(QUIET)  # what is claimed is about this time

    assert 1 + len(steps) == node_writes(cluster, mark)
    assert [] == kubelet_said(cluster, REGISTERED, since=since)


# Fewer slices than are held: pods keep theirs and run on, and what they leave is not listed again.
#
# A slice is given up when its pod is gone for a minute.

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
    await until_node_told(cluster, Told(8, 4), began, FAR * BOUND)
    await asyncio.sleep(QUIET)

    mark = cluster.plane.audit.mark()
    await asyncio.sleep(60.0)  # what is claimed is about this time

    assert 0 == node_writes(cluster, mark)
