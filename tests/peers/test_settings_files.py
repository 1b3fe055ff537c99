"""HAMi's settings files under a running agent: what an edit says, kubelet and scheduler learn."""

import asyncio
import json
import os
import sys

import pytest

from tests.peers.lab.agents import RESOURCE, SOURCE
from tests.peers.lab.clockwork import REGISTERED, kubelet_said, wall
from tests.peers.lab.config_files import (
    DEVICE_CONFIG,
    NODE_CONFIG,
    node_config,
    open_files,
)
from tests.peers.lab.grants import told_environment
from tests.peers.lab.identities import NODE, NODE_USER
from tests.peers.lab.node_state import gpu_uuids, node_of, registered
from tests.peers.lab.placement import place, share
from tests.peers.lab.pods import a_telling_pod, gpu_of
from tests.peers.lab.pods import until_told as until_pods_told
from tests.peers.lab.report import (
    Told,
    forget_events,
    node_events,
    node_writes,
    register_text,
    until_node_event,
    until_node_writes,
)
from tests.peers.lab.requests import mark_of_rest
from tests.peers.lab.settings import (
    ALL,
    QUIET,
    until_everywhere,
    with_node_config,
)

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
