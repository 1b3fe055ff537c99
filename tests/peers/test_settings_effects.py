"""What other settings do to pods and to the node, while the agent runs."""

import asyncio

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.clockwork import REGISTERED, kubelet_said, wall
from tests.peers.lab.config_files import NODE_CONFIG, node_config
from tests.peers.lab.grants import told_environment
from tests.peers.lab.node_state import (
    gpu_uuids,
    node_of,
    registered,
    registered_health,
    until_allocatable,
)
from tests.peers.lab.pods import a_telling_pod, lives_of, run, until_settled, until_told
from tests.peers.lab.report import (
    forget_events,
    node_events,
    node_writes,
    until_node_events,
    until_node_writes,
)
from tests.peers.lab.requests import mark_of_rest
from tests.peers.lab.settings import BOUND, QUIET, with_node_config
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
