"""What is measured beside the real peers: starts, memory, rest, Allocate."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from tests.bench import process
from tests.bench.beside import QUOTA, RealBed, open_bed
from tests.bench.figures import Figure
from tests.bench.installed import PLACE, chill, files
from tests.bench.instructions import Uncounted, count
from tests.peers.lab.agents import Agent

STARTS = 2
"""Starts of each kind for each run."""
SETTLED = 5.0
"""Seconds after which nothing of the start is under way any more."""
PYTHON = (str(PLACE / "bin/python"), "-I", "-c", "pass")
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
    floor: list[float] = []
    for _ in range(tries + 1):
        one = await bed.start()
        await bed.until_up(one.agent)
        await asyncio.sleep(SETTLED)
        times.append((one.seconds, one.cpu))
        weights.append(process.weight(one.agent.part.pid))
        await bed.end(one.agent)
        floor.append(process.cpu_of(*PYTHON) * 1000)
    how = "exec to exit, after each warm start: how fast the machine was"
    return times[1:], [
        Figure("real_python_cpu", "Python that does nothing, CPU", "ms", floor[1:], how),
        *_weights("settled", weights[1:], f"{SETTLED:g} s after it is ready"),
    ]


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

    def figure(kind: str, what: str, budget: float | None, peers: str, how: str = how) -> Figure:
        samples = [getattr(one, kind) / process.MEGA for one in found]
        told = f"{what}, {when}"
        return Figure(f"real_{kind}_{name}", told, "MB", samples, how, budget, peers=peers)

    return [
        figure("resident", "resident", 52, "52.0 MB; 28 to 33 MB"),
        figure("anonymous", "… anonymous", 38, "6.7 MB; 5.6 to 14 MB"),
        figure("file", "… of files", None, "45 MB"),
        figure("shared", "… mapped by other processes, too", None, ""),
        figure("peak", "peak until then", None, "", "VmHWM"),
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


async def instructions(runs: int) -> list[Figure]:
    """Instructions from exec to Register, in user mode."""
    async with open_bed() as bed:
        try:
            samples, how = await count(bed, runs)
        except Uncounted as error:
            samples, how = [], str(error)
    what = "exec → Register: instructions"
    return [Figure("real_start_instructions", what, "million", samples, how)]
