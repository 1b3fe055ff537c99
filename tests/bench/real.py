"""What is measured beside the real peers: starts, memory, rest, Allocate."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from agent.state import decode_state
from tests.bench import process
from tests.bench.beside import QUOTA, RealBed, kubelet_port, open_bed
from tests.bench.figures import Figure
from tests.bench.lab import PATIENCE, beside, chill, files
from tests.peers.lab.agents import Agent
from tests.peers.lab.control import ADMIN
from tests.peers.lab.pods import NAMESPACE, a_pod, as_if_generated

STARTS = 2
"""Starts of each kind for each run."""
SETTLED = 5.0
"""Seconds after which nothing of the start is under way any more."""
WINDOW = 10.0
WINDOWS = 12
LONG = 600.0
CORES = 0.2
_CLOCK = "the clock of the process in the kernel, at the moment of the kubelet's log line"
_SEEN = "exec → the kubelet's log line of the Register call"
HAMI_START = "18.3 ms; 30 to 85 ms to its socket"
HAMI_COLD = "39.5 ms, its first start"


async def starts(runs: int) -> list[Figure]:
    """exec → Register, warm, from disk, and within a part of a core; what the agent then weighs."""
    tries = runs * STARTS
    async with open_bed() as bed:
        warm = await _warm(bed, tries)
        paths = files()
        cold = await _starts(bed, tries, lambda: chill(paths))
        slow = (
            await _starts(bed, tries, at_gate=partial(bed.limit, CORES)) if QUOTA.exists() else []
        )
    where = "files of the installation and of Python dropped from the page cache (posix_fadvise)"
    share = "cgroup v1, cfs_quota_us" if slow else "there is no cgroup v1 to limit it"
    return [
        *_start("warm", "exec → Register", warm[0], _SEEN, 200, HAMI_START),
        *_start("cold", "… from disk", cold, f"{_SEEN}; {where}", None, HAMI_COLD),
        *_start("quota", f"… within {CORES:g} core", slow, f"{_SEEN}; {share}", 1500, ""),
        *warm[1],
    ]


Times = list[tuple[float, float]]
"""Seconds, and seconds on a core, of each start."""


async def _warm(bed: RealBed, tries: int) -> tuple[Times, list[Figure]]:
    """The first of these, which fills the page cache, is left out."""
    times: Times = []
    weights: list[process.Weight] = []
    for _ in range(tries + 1):
        one = await bed.start()
        await bed.until_up(one.agent)
        await asyncio.sleep(SETTLED)
        times.append((one.seconds, one.cpu))
        weights.append(process.weight(one.agent.part.pid))
        await bed.end(one.agent)
    return times[1:], [*_weights("settled", weights[1:], f"{SETTLED:g} s after it is ready")]


async def _starts(
    bed: RealBed,
    tries: int,
    prepare: Callable[[], None] = lambda: None,
    at_gate: Callable[[int], None] = lambda pid: None,
) -> Times:
    times: Times = []
    for _ in range(tries):
        prepare()
        one = await bed.start(at_gate=at_gate)
        await bed.end(one.agent)
        times.append((one.seconds, one.cpu))
    return times


def _start(
    name: str, what: str, times: Times, how: str, budget: float | None, peers: str
) -> list[Figure]:
    wall, cpu = ([one[part] * 1000 for one in times] for part in (0, 1))
    busy = 150 if budget is not None else None
    return [
        Figure(f"real_start_{name}", what, "ms", wall, how, budget, peers=peers),
        Figure(f"real_start_{name}_cpu", f"{what}, CPU", "ms", cpu, _CLOCK if cpu else how, busy),
    ]


def _weights(name: str, weights: Iterable[process.Weight], when: str) -> list[Figure]:
    found = list(weights)
    how = f"smaps_rollup, {when}, 1 MB = 10^6 bytes"

    def figure(kind: str, what: str, budget: float | None, peers: str) -> Figure:
        samples = [getattr(one, kind) / process.MEGA for one in found]
        told = f"{what}, {when}"
        return Figure(f"real_{kind}_{name}", told, "MB", samples, how, budget, peers=peers)

    return [
        figure("resident", "resident", 52, "52.0 MB; 28 to 33 MB"),
        figure("anonymous", "… anonymous", 38, "6.7 MB; 5.6 to 14 MB"),
    ]


async def ten_minutes(_: int) -> list[Figure]:
    """What an agent weighs that was left alone for ten minutes."""
    async with open_bed() as bed:
        agent = await _at_rest(bed)
        await asyncio.sleep(LONG)
        return _weights("later", [process.weight(agent.part.pid)], f"{LONG / 60:g} min after it")


async def rest(_: int) -> list[Figure]:
    """What the process does while nothing happens."""
    percents, wakes = list[float](), list[float]()
    loop = asyncio.get_running_loop()
    async with open_bed() as bed:
        pid = (await _at_rest(bed)).part.pid
        for _window in range(WINDOWS):
            begun = loop.time(), process.cpu_seconds(pid), process.wake_ups(pid)
            await asyncio.sleep(WINDOW)
            took = loop.time() - begun[0]
            percents.append((process.cpu_seconds(pid) - begun[1]) / took * 100)
            wakes.append((process.wake_ups(pid) - begun[2]) / took)
    how = f"{WINDOWS} windows of {WINDOW:g} s, 8 GPUs, no pod, no scrape"
    switches = f"context switches of all threads; {how}"
    return [
        Figure("real_rest_cpu", "CPU at rest, of a core", "%", percents, how, 0.05, peers=HAMI_CPU),
        Figure("real_rest_wakes", "wake-ups at rest", "/s", wakes, switches, 5, peers=HAMI_WAKES),
    ]


HAMI_CPU = "0.014 to 0.018 %"
HAMI_WAKES = "4.9 /s"


async def _at_rest(bed: RealBed) -> Agent:
    """An agent that has nothing to do, beside a kubelet that has nothing to tell."""
    await bed.calm()
    agent = (await bed.start()).agent
    await bed.until_up(agent)
    await asyncio.sleep(2 * SETTLED)
    return agent


# Allocate as the real kubelet meets it, and where its time goes.

PODS = 40
KUBELET = "kubelet_device_plugin_alloc_duration_seconds"
INSIDE = "hami_agent_rpc_duration_seconds"
HAMI = "1,319 ms, 21.9 ms with 5 s between pods; -"


async def allocates(_: int) -> list[Figure]:
    """Pods one by one, placed by hand, and after each what it could not do without, by itself."""
    at_kubelet, inside, tolls = list[float](), list[float](), list[tuple[float, float]]()
    written = list[int]()
    async with open_bed() as bed:
        cluster = bed.cluster
        agent = (await bed.start()).agent
        await bed.until_up(agent)
        state = cluster.space.view / "var/lib/hami-agent/state.json"
        directory = state.parent / "toll"
        directory.mkdir()
        arguments = str(directory), str(cluster.kubelet.pod_resources)
        async with beside("tests.bench.toll", *arguments) as (told, said):
            for number in range(PODS + 1):
                name = f"one-{number}"
                before = await _kubelet_sum(bed), await _agent_sum(agent)
                await cluster.place(as_if_generated(a_pod(name)), [[cluster.share(number % 8)]])
                await cluster.until_running(name)
                await cluster.until_unlocked()
                now = await _kubelet_sum(bed), await _agent_sum(agent)
                written.append(decode_state(state.read_bytes()).generation)
                told.write(f"{state.stat().st_size} {NAMESPACE} {name}\n".encode())
                async with asyncio.timeout(PATIENCE):
                    disk, question = map(float, (await said.readline()).split())
                await cluster.delete(name, grace=0)
                await cluster.until_deleted(name)
                if number:  # the first has to find its way
                    at_kubelet.append((now[0] - before[0]) * 1000)
                    inside.append((now[1] - before[1]) * 1000)
                    tolls.append((disk, question))
    how = f"{KUBELET} of each of {PODS} pods, one after the other"
    over = [took / sum(floor) for took, floor in zip(inside, tolls, strict=True)]
    writes = [float(after - before) for before, after in pairwise(written)]
    settled = "generations of state.json from one settled pod to the next, its end included"
    own, what = f"{INSIDE} of each pod", "Allocate in the agent"
    paired = "pod by pod: the Allocate and what disk and question took by themselves just after"
    return [
        Figure("real_allocate", "Allocate at the kubelet", "ms", at_kubelet, how, peers=HAMI),
        Figure("real_allocate_inside", what, "ms", inside, own),
        Figure("real_state_writes", "writes of the state from pod to pod", "", writes, settled),
        Figure("real_allocate_over_both", f"{what} over both", "x", over, paired, 1.3),
    ]


async def _kubelet_sum(bed: RealBed) -> float:
    """Seconds that all Allocates took at the kubelet, by its own metrics."""
    cluster = bed.cluster
    url = f"https://127.0.0.1:{kubelet_port(cluster)}/metrics"
    headers = {"Authorization": f"Bearer {cluster.plane.tokens[ADMIN]}"}
    async with (
        aiohttp.ClientSession(headers=headers, raise_for_status=True) as session,
        session.get(url, ssl=False) as answer,  # it signs its own certificate
    ):
        text = await answer.text()
    return sum(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{KUBELET}_sum")
    )


async def _agent_sum(agent: Agent) -> float:
    """Seconds of all Allocates that were answered. The page may be a quarter of a second old."""
    await asyncio.sleep(0.3)
    _, text = await agent.page("/metrics")
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"{INSIDE}_sum" and sample.labels["method"] == "allocate"
    )
