"""What is measured on the models: restarts, XIDs, Allocates, memory, regions."""

import asyncio
import contextlib
import datetime as dt
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

from agent.sandbox.hami_core import MEMORY_LIMIT, HamiCoreRegion
from agent.sandbox.hardware_talk import HardwareRequest, ask
from agent.sandbox.lab.cluster import NAMESPACE, SandboxCluster, fetch, scrape
from agent.sandbox.scenario.facts import is_locked, is_running, pod_facts
from agent.sandbox.scenario.stage import plain
from agent.usage import HostRegions, use_of
from tests.bench.figures import Figure
from tests.bench.lab import PATIENCE, beside, reach, served
from tests.bench.process import Weight, weight
from tests.fakes import nvml_stub
from tests.fakes.offload import Inline
from tests.host.proc_node import ProcNode


async def restarts(runs: int) -> list[Figure]:
    """SIGKILL → serving."""
    killed: list[float] = []
    async with served() as cluster:
        history = cluster.kubelet.history
        for _ in range(runs):
            begun, seen = asyncio.get_running_loop().time(), len(history.of("listed"))
            await cluster.agent.kill()
            await cluster.start_agent()
            await reach(cluster, partial(_has_more, cluster, seen))
            killed.append((history.of("listed")[-1].elapsed - begun) * 1000)
    how = "from the signal to the next list at the kubelet model, the new exec included"
    return [Figure("kill_to_serving", "SIGKILL → serving again", "ms", killed, how, 500)]


def _has_more(cluster: SandboxCluster, lists: int) -> bool:
    return len(cluster.kubelet.history.of("listed")) > lists


# From an XID to the list that takes its GPU away, at an agent at rest; all GPUs at once.

REST = 0.3
"""Seconds without a list after which an agent is at rest: what follows a list waits 50 ms."""
SETTLED = 2.0


async def events(runs: int) -> list[Figure]:
    """XID → list on the stream, one GPU after the other; all GPUs lost at once."""
    single: list[float] = []
    counts: list[float] = []
    lost: list[float] = []
    for _ in range(runs):
        async with served(16, 100) as cluster, reader(cluster) as lists:
            for gpu in range(16):
                single += (await _struck(cluster, lists, [gpu], REST))[:1]
        async with served(8, 1000) as cluster, reader(cluster) as lists:
            came = await _struck(cluster, lists, range(8), SETTLED)
            counts.append(len(came))
            lost.append(came[-1])
    what, name = "XID → list, 1,600 slices", "xid_to_list"
    how = (
        "from the first request to the simulated GPUs of an agent at rest to the bytes of the "
        f"list at a second stream; {runs} agents"
    )
    all_lost = "8 GPUs of 1,000 slices lost at once"
    return [
        Figure(f"{name}_p50", f"{what}, p50", "ms", single, how),
        Figure(f"{name}_p99", f"{what}, p99", "ms", single, how, 20, 99),
        Figure("lost_lists", f"{all_lost}: lists, at most", "", counts, how, 1, 100),
        Figure("lost_to_list", f"{all_lost} → last list", "ms", lost, how, 25),
    ]


@contextlib.asynccontextmanager
async def reader(cluster: SandboxCluster) -> AsyncIterator[asyncio.StreamReader]:
    """A second stream of lists, once its first one has come."""
    (socket,) = (
        path for path in cluster.places.plugins.glob("*.sock") if path.name != "kubelet.sock"
    )
    async with beside("tests.bench.reader", str(socket)) as (_, lists):
        await _next(lists)
        yield lists


async def _struck(
    cluster: SandboxCluster, lists: asyncio.StreamReader, gpus: Iterable[int], rest: float
) -> list[float]:
    """Milliseconds until each list that follows the XIDs of an agent at rest."""
    await _at_rest(lists)
    begun = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        for gpu in gpus:
            request = HardwareRequest("xid", str(gpu), 79)
            group.create_task(ask(cluster.places.hardware_socket, request))
    came = [await _next(lists), *await _at_rest(lists, rest)]
    return [(moment - begun) * 1000 for moment in came]


async def _next(lists: asyncio.StreamReader, within: float = PATIENCE) -> float:
    """When the next list came to the reader. Raises TimeoutError, RuntimeError."""
    async with asyncio.timeout(within):
        line = await lists.readline()
    if not line:
        raise RuntimeError("the reader of lists has ended")
    return float(line)


async def _at_rest(lists: asyncio.StreamReader, rest: float = REST) -> list[float]:
    """Wait until no list has come for so long; when those came that did."""
    came: list[float] = []
    with contextlib.suppress(TimeoutError):
        while True:
            came.append(await _next(lists, rest))
    return came


# Pods one after the other: Allocates beside a storm and a scrape, and what the agent weighs then.

RPC = "hami_agent_rpc_duration_seconds"
PODS = 30
STORM_PAUSE = 0.02
SCRAPE_PAUSE = 0.25
APPLICATION = 31
"""An XID of an application, which every GPU reports again and again and which takes no GPU away."""


async def allocates(_: int) -> list[Figure]:
    """Allocates beside a storm; the first, which finds its way, is left out."""
    found: list[float] = []
    async with served() as cluster, storm(cluster):
        for number in range(PODS + 2):
            found.append(await spent(cluster, number))
            async with a_pod(cluster, f"storm-{number}"):
                pass
    took = [now - before for before, now in pairwise(found[1:])]
    how, what = "the agent's own clock, pod by pod", "Allocate beside XIDs and a scrape"
    return [
        Figure(f"allocate_storm_p{percent}", f"{what}, p{percent}", "ms", took, how, None, percent)
        for percent in (50, 99)
    ]


async def spent(cluster: SandboxCluster, pods: int) -> float:
    """Milliseconds of all Allocates together, once the page counts that many: it may be old."""
    while True:
        rpcs = {
            name: value
            for name, labels, value in await scrape(cluster.web_address or "")
            if name.startswith(RPC) and labels["method"] == "allocate" and "le" not in labels
        }
        if rpcs.get(f"{RPC}_count", 0) == pods:
            return rpcs.get(f"{RPC}_sum", 0.0) * 1000
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def a_pod(cluster: SandboxCluster, name: str) -> AsyncIterator[None]:
    """A pod comes, runs, is settled, and goes when the block is left.

    Its name counts as generated, as controllers make them; for another the API server is asked.
    """
    pod = plain(name).pod()
    pod["metadata"]["generateName"] = "pod-"
    cluster.submit(pod)
    await reach(cluster, lambda: is_running(cluster, name))
    await reach(cluster, lambda: pod_facts(cluster, name).is_settled and not is_locked(cluster))
    yield
    cluster.store.delete("pods", NAMESPACE, name, grace=0)


@contextlib.asynccontextmanager
async def storm(cluster: SandboxCluster) -> AsyncIterator[None]:
    """Each GPU reports an XID every 20 ms, and /metrics is read every 0.25 s."""

    async def strike() -> None:
        while True:
            for gpu in range(8):
                request = HardwareRequest("xid", str(gpu), APPLICATION)
                await ask(cluster.places.hardware_socket, request)
                await asyncio.sleep(STORM_PAUSE / 8)

    async def read() -> None:
        while True:
            await fetch(cluster.web_address or "", "/metrics")
            await asyncio.sleep(SCRAPE_PAUSE)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(strike()), group.create_task(read())]
        yield
        for task in tasks:
            task.cancel()


FEW = 100
"""Pods after which everything that an Allocate needs is loaded, and caches are full."""
MANY = 3600
"""As many as one a second are in an hour. They come faster here, so more of those that are gone are
still kept: for 10 minutes, 1,024 at most."""
CALM = 12.0
"""Seconds after which an agent that has served pods is at rest, too."""


async def churn(_: int) -> list[Figure]:
    """Memory after FEW pods, and after MANY more; the GPUs are those of the C stub."""
    found: dict[int, Weight] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = nvml_stub.build(Path(folder))
        stub = nvml_stub.NvmlStub(library)
        for slot in range(8):
            stub.set(slot, memory=80 << 30)
        stub.order(range(8))
        async with served(8, 10, "--simulate", "", "--nvml-library", str(library)) as cluster:
            for number in range(1, FEW + MANY + 1):
                async with a_pod(cluster, f"pod-{number}"):
                    pass
                if number in {FEW, FEW + MANY}:
                    await asyncio.sleep(CALM)
                    found[number] = weight(cluster.agent.pid)
    return [
        figure
        for pods, one in found.items()
        for figure in one.figures(f"after {pods:,} pods", f"{CALM:g} s later; API without TLS")
    ]


# What a round over the regions of a full node costs the agent.

CONTAINERS = 100
GPUS = tuple(f"GPU-{index:08x}-1111-2222-3333-444444444444" for index in range(8))
PIDS = range(1, 11)
"""The processes of each container; the first two use its GPUs."""
ROUNDS = 20
NOW = dt.datetime(2026, 11, 26, tzinfo=dt.UTC)


async def regions(_: int) -> list[Figure]:
    """Read 100 regions, and know which of their processes exist."""
    rounds = list[float]()
    with tempfile.TemporaryDirectory() as made:
        top = Path(made)
        node = ProcNode(top)
        names = list(_containers(top, node))
        adapter = HostRegions(top, Inline(), node.processes)
        await adapter.read(names)
        for _ in range(ROUNDS):
            begun = time.process_time()
            readings = await adapter.read(names)
            rounds.append((time.process_time() - begun) * 1000)
        assert {2} == {use_of(sums, NOW).processes for sums in readings.values()}
    how = f"CPU of the process; {CONTAINERS} containers of 8 GPUs, 2 of 10 processes on them"
    what = "a round over all regions, and who lives"
    return [Figure("regions_read", what, "ms", rounds, how, 25)]


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
