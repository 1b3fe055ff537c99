"""Measuring a real agent in a sandbox."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from agent.sandbox.hardware_file import described
from agent.sandbox.lab.child import child_environment
from agent.sandbox.lab.cluster import NAMESPACE, LabOptions, SandboxCluster, open_cluster
from agent.sandbox.lab.web import scrape
from agent.sandbox.scenario.facts import is_locked, is_running, pod_facts
from agent.sandbox.scenario.workloads import plain
from agent.sandbox.scheduler.model import SchedulerSettings
from tests.bench import toll
from tests.bench.figures import Figure, percentile
from tests.bench.floor import ROOT

PATIENCE = 30.0
SETTLED = 2.0
"""Seconds after which nothing of the start is under way any more."""
IDLE = 10.0
PODS = 60
BURST = 20
EXEC = "from exec to the Register call at the kubelet model"


async def reach(cluster: SandboxCluster, holds: Callable[[], bool]) -> None:
    """Wait for a fact. Raises RuntimeError with the agent's last words."""
    if not await cluster.until(holds, PATIENCE):
        raise RuntimeError("\n".join(["what is measured did not come:", *cluster.log.last(20)]))


async def next_list(cluster: SandboxCluster, seen: int) -> float:
    """When the next list came, after `seen` of them."""
    history = cluster.kubelet.history
    await reach(cluster, lambda: len(history.of("listed")) > seen)
    return history.of("listed")[-1].elapsed


@contextlib.asynccontextmanager
async def served(gpus: int = 8, split_count: int = 10) -> AsyncIterator[SandboxCluster]:
    """A sandbox whose agent serves, watches, has reported and answers on its web door."""
    environ = child_environment(os.environ)  # noqa: TID251 -- handed on to real processes
    options = LabOptions(
        described(f"h100:{gpus}"),
        environ,
        arguments=("--split-count", str(split_count)),
        scheduler=SchedulerSettings().quick(),  # the agent is measured, and not HAMi's queue
    )
    async with open_cluster(options) as cluster:
        await cluster.start_agent()
        await reach(cluster, lambda: cluster.allocatable() == gpus * split_count)
        await reach(cluster, lambda: cluster.api.journal.watches(cluster.user) >= 2)
        await reach(cluster, lambda: cluster.api.journal.writes(cluster.user) >= 1)
        await reach(cluster, lambda: cluster.web_address is not None)
        yield cluster


async def starts(runs: int) -> list[Figure]:
    """exec → Register, and what the process then weighs."""
    registered: list[float] = []
    weights: list[float] = []
    for _ in range(runs + 1):
        async with served() as cluster:
            event = cluster.kubelet.history.of("registered")[0]
            registered.append((event.elapsed - cluster.agent.started) * 1000)
            await asyncio.sleep(SETTLED)
            weights.append(_resident_mb(cluster.agent.pid))
    how = f"{EXEC}; the first run, which warms the disk cache, is left out"
    return [
        Figure("exec_to_register", "exec → Register call", "ms", registered[1:], how, 200),
        Figure(
            "rss",
            "RSS, 8 GPUs of 10 slices, API connected",
            "MB",
            weights[1:],
            f"VmRSS, {SETTLED:g} s after both watches are up, 1 MB = 10^6 bytes",
            56,
        ),
    ]


async def restarts(runs: int) -> list[Figure]:
    """SIGKILL → serving, and a new kubelet's socket → Register and list."""
    killed: list[float] = []
    registers: list[float] = []
    lists: list[float] = []
    async with served() as cluster:
        history = cluster.kubelet.history
        loop = asyncio.get_running_loop()
        for _ in range(runs):
            begun, seen = loop.time(), len(history.of("listed"))
            await cluster.kill_agent()
            await cluster.start_agent()
            killed.append((await next_list(cluster, seen) - begun) * 1000)
        for _ in range(runs):
            seen = len(history.of("listed"))
            await cluster.kubelet.restart()
            listed = await next_list(cluster, seen)
            up = history.of("started")[-1].elapsed
            registers.append((history.of("registered")[-1].elapsed - up) * 1000)
            lists.append((listed - up) * 1000)
    socket = "from the moment that the kubelet model serves its sockets"
    return [
        Figure(
            "kill_to_serving",
            "SIGKILL → serving again",
            "ms",
            killed,
            "from the signal to the next list at the kubelet model, the new exec included",
            500,
        ),
        Figure("socket_to_register", "kubelet socket → Register", "ms", registers, socket, 300),
        Figure("socket_to_list", "kubelet socket → allocatable", "ms", lists, socket, 1000),
    ]


@contextlib.asynccontextmanager
async def reader(cluster: SandboxCluster) -> AsyncIterator[asyncio.StreamReader]:
    (socket,) = (
        path for path in cluster.places.plugins.glob("*.sock") if path.name != "kubelet.sock"
    )
    async with _beside("tests.bench.reader", str(socket)) as (_, lists):
        yield lists


@contextlib.asynccontextmanager
async def _beside(
    module: str, *arguments: str
) -> AsyncIterator[tuple[asyncio.StreamWriter, asyncio.StreamReader]]:
    """A program of ours in a process of its own, until the block is left: what it is told, says."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdin, process.stdout
    finally:
        process.kill()
        await process.wait()


async def next_line(lists: asyncio.StreamReader) -> float:
    """When the next list came to the reader."""
    async with asyncio.timeout(PATIENCE):
        return float((await lists.readline()).split()[0])


async def pods() -> list[Figure]:
    """Allocate, and what pods cost the API server: one by one, then a burst."""
    async with served() as cluster:
        journal, user = cluster.api.journal, cluster.user
        begun = journal.writes(user), journal.reads(user)
        inside = await _allocates(cluster)
        writes = (journal.writes(user) - begun[0]) / PODS
        reads = (journal.reads(user) - begun[1]) / PODS
        rpcs = _rpcs(cluster)
        before = journal.reads(user)
        burst = [f"burst-{number}" for number in range(BURST)]
        for name in burst:
            cluster.submit(plain(name).pod())
        await reach(cluster, lambda: all(is_running(cluster, name) for name in burst))
        burst_reads = (journal.reads(user) - before) / BURST
    around = "around the call at the kubelet model, its loop and gRPC included"
    rpc = "Allocate"
    return [
        *inside,
        Figure("allocate_rpc_p50", f"{rpc} at the kubelet, p50", "ms", rpcs, around),
        Figure(
            "allocate_rpc_p99",
            f"{rpc} at the kubelet, p99",
            "ms",
            rpcs,
            around,
            value=percentile(rpcs, 99),
        ),
        Figure("writes_per_pod", "API writes a pod", "", [writes], f"{PODS} pods one by one", 2),
        Figure("reads_per_pod", "API reads a pod", "", [reads], f"{PODS} pods one by one", 0),
        Figure("reads_in_burst", "API reads a pod in a burst", "", [burst_reads], f"{BURST} pods"),
    ]


async def idle() -> list[Figure]:
    """What the process costs while nothing happens."""
    async with served() as cluster, _a_pod(cluster, "only"):
        await asyncio.sleep(SETTLED)
        journal, pid = cluster.api.journal, cluster.agent.pid
        calls, spent = sum(journal.counts.values()), _cpu_seconds(pid)
        await asyncio.sleep(IDLE)
        percent = (_cpu_seconds(pid) - spent) / IDLE * 100
        requests = sum(journal.counts.values()) - calls
    how = f"time on a core (schedstat) over {IDLE:g} s, one pod running"
    return [
        Figure("idle_cpu", "CPU while idle", "%", [percent], how, 0.3),
        Figure("idle_requests", "API requests while idle", "", [requests], how, 0),
    ]


@contextlib.asynccontextmanager
async def _a_pod(cluster: SandboxCluster, name: str) -> AsyncIterator[None]:
    """A pod comes, runs, is settled, and goes when the block is left."""
    cluster.submit(plain(name).pod())
    await reach(cluster, lambda: is_running(cluster, name))
    await reach(cluster, lambda: pod_facts(cluster, name).is_settled and not is_locked(cluster))
    yield
    cluster.store.delete("pods", NAMESPACE, name, grace=0)


async def _allocates(cluster: SandboxCluster) -> list[Figure]:
    """Pods one by one, and after each what its Allocate could not do without, by itself."""
    places = cluster.places
    directory = places.root / "toll"
    directory.mkdir()
    took: list[float] = []
    tolls: list[toll.Toll] = []
    arguments = str(directory), str(places.pod_resources / "kubelet.sock")
    async with _beside("tests.bench.toll", *arguments) as (told, said):
        for number in range(PODS):
            name = f"pod-{number}"
            async with _a_pod(cluster, name):
                size = (places.state / "state.json").stat().st_size
                told.write(f"{size} {NAMESPACE} {name}\n".encode())
                async with asyncio.timeout(PATIENCE):
                    disk, question = map(float, (await said.readline()).split())
            total = await _spent(cluster, number + 1)
            took.append(total - sum(took))
            tolls.append((disk, question))
    # The first of each has to find its way.
    return toll.figures(took[1:], tolls[1:])


def _rpcs(cluster: SandboxCluster) -> list[float]:
    begun: dict[tuple[str, str], float] = {}
    found: list[float] = []
    for event in cluster.kubelet.history.of("allocating", "allocated"):
        key = event.pod, event.container
        if event.kind == "allocating":
            begun[key] = event.elapsed
        else:
            found.append((event.elapsed - begun[key]) * 1000)
    return found


async def _spent(cluster: SandboxCluster, pods: int) -> float:
    """The ms of all Allocates together, once the page counts that many: it may be 0.25 s old."""
    while True:
        found = {
            name.rpartition("_")[2]: value
            for name, labels, value in await scrape(cluster.web_address or "")
            if name.startswith("hami_agent_rpc_duration_seconds_")
            and labels["method"] == "allocate"
            and "le" not in labels
        }
        if found["count"] == pods:
            return found["sum"] * 1000
        if found["count"] > pods:
            raise RuntimeError(f"the agent counts {found['count']:g} Allocates after {pods} pods")
        await asyncio.sleep(0.05)


def _resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/{pid}/status tells no VmRSS")


def _cpu_seconds(pid: int) -> float:
    """Time on a core, of all threads, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
