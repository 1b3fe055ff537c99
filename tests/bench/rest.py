"""What the agent weighs after as many pods as an hour may bring, one after the other."""

import asyncio
import contextlib
import datetime as dt
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from agent.sandbox.hami_core import MEMORY_LIMIT, HamiCoreRegion
from agent.sandbox.hardware_talk import HardwareRequest, ask
from agent.sandbox.lab.cluster import SandboxCluster
from agent.usage import HostRegions, use_of
from tests.bench.allocates import a_pod
from tests.bench.figures import Figure, percentile
from tests.bench.lab import CALM, SETTLED, next_line, next_list, reader, served, with_library
from tests.bench.process import MEGA, Weight, weight
from tests.fakes.offload import Inline
from tests.host.proc_node import ProcNode

FEW = 100
"""Pods after which everything that an Allocate needs is loaded, and caches are full."""
MANY = 3600
"""As many as one a second are in an hour. They come faster here, so more of those that are gone are
still kept: for 10 minutes, 1,024 at most."""


async def churn(_: int) -> list[Figure]:
    """Memory after FEW pods, and after MANY more."""
    async with with_library() as cluster:
        few = await _after(cluster, range(FEW))
        many = await _after(cluster, range(FEW, FEW + MANY))

    def figure(kind: str, told: str, after: int, megabytes: float, budget: float) -> Figure:
        how = f"smaps_rollup, {CALM:g} s after pod {after}; API model without TLS"
        name = f"churn_{kind}_{after}"
        return Figure(name, f"{told} after {after:,} pods", "MB", [megabytes], how, budget)

    return [
        figure(kind, told, after, getattr(found, kind) / MEGA, budget)
        for after, found in ((FEW, few), (FEW + MANY, many))
        for kind, told, budget in (("resident", "resident", 52), ("anonymous", "… anonymous", 38))
    ]


async def _after(cluster: SandboxCluster, numbers: range) -> Weight:
    for number in numbers:
        async with a_pod(cluster, f"pod-{number}"):
            pass
    await asyncio.sleep(CALM)
    return weight(cluster.agent.pid)


# What a round over the regions of a full node costs the agent.

CONTAINERS = 100
GPUS = tuple(f"GPU-{index:08x}-1111-2222-3333-444444444444" for index in range(8))
PIDS = range(1, 11)
"""The processes of each container; the first two use its GPUs."""
ROUNDS = 20
NOW = dt.datetime(2026, 11, 26, tzinfo=dt.UTC)


async def regions(_: int) -> list[Figure]:
    """Read 100 regions, know which of their processes exist, and sum what they use."""
    with tempfile.TemporaryDirectory() as made:
        top = Path(made)
        node = ProcNode(top)
        names = list(_containers(top, node))
        adapter = HostRegions(top, Inline(), node.processes)
        await adapter.read(names)
        rounds, sums = list[float](), list[float]()
        for _ in range(ROUNDS):
            begun = time.process_time()
            readings = await adapter.read(names)
            read = time.process_time()
            uses = [use_of(sums, NOW) for sums in readings.values()]
            rounds.append((read - begun) * 1000)
            sums.append((time.process_time() - read) * 1000)
        assert {2} == {use.processes for use in uses}
    how = f"CPU of the process; {CONTAINERS} containers of 8 GPUs, 2 of 10 processes on them"
    return [
        Figure("regions_read", "a round over all regions, and who lives", "ms", rounds, how, 25),
        Figure("regions_sum", "the sums of a round", "ms", sums, how),
    ]


def _containers(top: Path, node: ProcNode) -> Iterator[str]:
    for number in range(CONTAINERS):
        uid = f"6f1c1f0e-8f5a-4a52-9d2e-{number:012x}"
        name = f"{uid}_main"
        directory = top / "vgpu/containers" / name
        directory.mkdir(parents=True)
        region = HamiCoreRegion(directory / "usage.cache")
        for pid in PIDS[:2]:
            process = region.start(pid, {MEMORY_LIMIT: "8g"}, NOW)
            for gpu in range(len(GPUS)):
                process.allocate(gpu, 1 << 30)
        region.name_gpus(GPUS)
        node.container(PIDS, pod=f"pod{uid}", mounted=name)
        yield name


# From an XID to the list that takes its GPU away, at an agent at rest; all GPUs at once.

REST = 0.3
"""Seconds without a list after which an agent is at rest: what follows a list waits 50 ms."""

SIZES = ((8, 1), (16, 100), (16, 1000))
"""GPUs, and slices of each."""


async def events(runs: int) -> list[Figure]:
    """XID → list on the stream, by the number of slices; all GPUs lost at once."""
    figures: list[Figure] = []
    for gpus, split_count in SIZES:
        figures += await _events(gpus, split_count, runs)
    return [*figures, *await _lost(8, 1000, runs)]


async def _events(gpus: int, split_count: int, runs: int) -> list[Figure]:
    """Strike one GPU after the other, each time an agent at rest."""
    took: list[float] = []
    known: list[float] = []
    for _ in range(runs):
        async with served(gpus, split_count) as cluster, reader(cluster) as lists:
            history = cluster.kubelet.history
            await next_line(lists)
            for gpu in range(gpus):
                await at_rest(lists)
                seen = len(history.of("listed"))
                begun = asyncio.get_running_loop().time()
                await _strike(cluster, gpu)
                known.append((await next_list(cluster, seen) - begun) * 1000)
                took.append((await next_line(lists) - begun) * 1000)
    slices = gpus * split_count
    how = (
        "from the request to the simulated GPU of an agent at rest to the bytes of the list at a "
        f"second stream; {runs} agents, each GPU once"
    )
    model = "the same to the decoded list at the kubelet model, its checkpoint written"
    what, name = f"XID → list, {slices:,} slices", f"xid_to_list_{slices}"
    bound = 20 if slices <= 1600 else None
    return [
        Figure(f"{name}_p50", f"{what}, p50", "ms", took, how),
        Figure(f"{name}_p99", f"{what}, p99", "ms", took, how, bound, percentile(took, 99)),
        Figure(f"xid_to_kubelet_{slices}", f"{what}: the kubelet model knows", "ms", known, model),
    ]


async def _lost(gpus: int, split_count: int, runs: int) -> list[Figure]:
    """All GPUs fall off the bus at once, each with its XID: how many lists, and when the last."""
    counts: list[float] = []
    took: list[float] = []
    for _ in range(runs):
        async with served(gpus, split_count) as cluster, reader(cluster) as lists:
            await next_line(lists)
            await at_rest(lists)
            begun = asyncio.get_running_loop().time()
            async with asyncio.TaskGroup() as group:
                for gpu in range(gpus):
                    group.create_task(_strike(cluster, gpu))
            came = [await next_line(lists), *await at_rest(lists, SETTLED)]
            counts.append(len(came))
            took.append((came[-1] - begun) * 1000)
    what = f"{gpus} GPUs of {split_count:,} slices lost at once"
    how = (
        f"from the first request to the simulated GPUs to the bytes of the last list; {runs} agents"
    )
    return [
        Figure("lost_lists", f"{what}: lists, at most", "", counts, how, 1, max(counts)),
        Figure("lost_to_list", f"{what} → last list", "ms", took, how, 25),
    ]


async def _strike(cluster: SandboxCluster, gpu: int) -> None:
    await ask(cluster.places.hardware_socket, HardwareRequest("xid", str(gpu), 79))


async def at_rest(lists: asyncio.StreamReader, rest: float = REST) -> list[float]:
    """Wait until no list has come for so long; when those came that did."""
    came: list[float] = []
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(rest):
                line = await lists.readline()
            if not line:
                raise RuntimeError("the reader of lists has ended")
            came.append(float(line.split()[0]))
    return came
