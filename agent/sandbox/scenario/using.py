"""A step of the scenario: processes of the placed pods use their GPUs, and the agent says so."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from agent.core.inventory.share import Share
from agent.core.inventory.slices import MIB
from agent.host.clock import SystemClock
from agent.sandbox.hami_core import HAMI_2_9_0, HamiCoreRegion
from agent.sandbox.lab.web import scrape
from agent.sandbox.scenario.facts import answers, parsed, pod_facts
from agent.sandbox.scenario.stage import PATIENCE, Stage, milliseconds
from agent.wire.v1beta1 import ContainerAllocateResponse

CACHE: Final = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
"""The variable that names the region in the container."""
SERIES: Final = "hami_agent_container_memory_used_bytes"
PID: Final = 7
PART: Final = 4
"""A process takes one part in so many of its memory."""
PERCENT: Final = 35
LOOK: Final = 0.25
"""Seconds between two looks at the metrics."""

Use = Mapping[tuple[str, str, str], int]
"""Pod, container and index of the GPU → MiB."""


async def use_gpus(stage: Stage) -> None:
    """One process of each container takes memory and starts a kernel; the metrics show it."""
    stage.record.note("a process of each container uses its GPUs")
    begun = stage.now
    expected = dict(_begin(stage))
    stage.record.awaited = stage.record.promised["used"]
    found = await _told(stage)
    while found != expected and stage.now < begun + PATIENCE:
        await asyncio.sleep(LOOK)
        found = await _told(stage)
    text = f"{sum(expected.values())} MiB in {len(expected)} shares"
    problems = [] if found == expected else [f"the metrics have {found}, not {expected}"]
    stage.settle("used", f"{text} after {milliseconds(stage.now - begun)}", problems)


def _begin(stage: Stage) -> Iterator[tuple[tuple[str, str, str], int]]:
    """Start the processes. Yields what each then uses of each GPU."""
    kept = answers(stage.cluster)
    for name in stage.placed:
        pod = pod_facts(stage.cluster, name)
        shares = pod.shares()
        for container in (one["name"] for one in pod.pod["spec"]["containers"]):
            if not shares[container]:
                continue
            gpus = sorted(shares[container], key=lambda share: stage.gpus[share.uuid].pci)
            answer = parsed(kept[pod.uid, container])
            for share, mib in zip(gpus, _start(answer, gpus), strict=True):
                stage.cluster.hardware.use(share.uuid, mib, PERCENT)
                yield (name, container, str(stage.gpus[share.uuid].index)), mib


def _start(answer: ContainerAllocateResponse, gpus: list[Share]) -> list[int]:
    """Start a process with what the kubelet keeps for its container; the MiB that it takes."""
    region, now = HamiCoreRegion(_region(answer), HAMI_2_9_0), SystemClock().now()
    process = region.start(PID, dict(answer.envs), now)
    region.name_gpus([share.uuid for share in gpus])
    taken = [share.memory_mib // PART for share in gpus]
    for gpu, mib in enumerate(taken):
        process.allocate(gpu, mib * MIB)
        process.watch(gpu, PERCENT)
        process.launch(now, gpu)
    return taken


def _region(answer: ContainerAllocateResponse) -> Path:
    """Where the container's region is on the host."""
    cache = PurePosixPath(answer.envs[CACHE])
    mounts = {mount.container_path: mount.host_path for mount in answer.mounts}
    return Path(mounts[str(cache.parent)]) / cache.name


async def _told(stage: Stage) -> Use:
    """What the agent's metrics say."""
    address = stage.cluster.web_address
    samples = await scrape(address) if address else []
    return {
        (labels["pod"], labels["container"], labels["gpu"]): int(value) // MIB
        for name, labels, value in samples
        if name == SERIES
    }
