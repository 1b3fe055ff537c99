"""A real GPU, where there is one: what it says of itself, a long watch, and the same GPU after it.

What it says is printed, so that it can be kept: `make test-gpu WATCH=300`.
"""

import asyncio
import sys
import threading
from collections.abc import Iterable, Iterator

import msgspec
import pytest

from agent.errors import GpuError
from agent.gpu.driver import NvmlDriver
from agent.model import DriverEvent, ProbeOutcome, Scan
from tests.contract.real_driver import open_real_driver

pytestmark = [pytest.mark.gpu, pytest.mark.looptime(False), pytest.mark.timeout(24 * 3600)]

SAMPLE_PERIOD = 1.0
PROBE_PERIOD = 10.0


class WatchedGpu(msgspec.Struct):
    """What a watch has seen; everything but `events` in numbers."""

    samples: int = 0
    probes: int = 0
    scans: int = 0
    events: list[DriverEvent] = msgspec.field(default_factory=list)
    failures: list[str] = msgspec.field(default_factory=list)
    slowest: float = 0.0


def lines_of(value: msgspec.Struct) -> Iterator[str]:
    """The fields of a value, one a line."""
    for name, one in msgspec.structs.asdict(value).items():
        yield f"    {name}: {one!r}"


def say(lines: Iterable[str]) -> None:
    """Print them, in the middle of a test's output."""
    sys.stdout.write("\n".join(["", *lines, ""]))


async def description(driver: NvmlDriver, scan: Scan) -> list[str]:
    """Everything that the driver says, for people."""
    lines = [f"driver {scan.driver_version}"]
    lines += [f"fault: {fault}" for fault in scan.faults]
    for gpu in scan.gpus:
        probe = await driver.probe(gpu.uuid)
        lines += [f"GPU {gpu.index}", *lines_of(gpu), *lines_of(probe.signs)]
        lines += lines_of(await driver.sample(gpu.uuid))
    return lines


async def watch(driver: NvmlDriver, scan: Scan, seconds: float) -> WatchedGpu:
    """Listen, sample and probe as the agent does, for so long."""
    seen, loop = WatchedGpu(), asyncio.get_running_loop()
    next_probe = loop.time()
    end = next_probe + seconds

    async def listen() -> None:
        async for event in driver.events():
            seen.events.append(event)

    async with asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(listen())
        while (begun := loop.time()) < end:
            for gpu in scan.gpus:
                seen.samples += 1
                try:
                    await driver.sample(gpu.uuid)
                except GpuError as error:
                    seen.failures.append(str(error))
            if begun >= next_probe:
                next_probe = begun + PROBE_PERIOD
                await _probe(driver, scan, seen)
            seen.slowest = max(seen.slowest, loop.time() - begun)
            await asyncio.sleep(SAMPLE_PERIOD)
        listening.cancel()
    return seen


async def _probe(driver: NvmlDriver, scan: Scan, seen: WatchedGpu) -> None:
    for gpu in scan.gpus:
        seen.probes += 1
        probe = await driver.probe(gpu.uuid)
        if probe.outcome is not ProbeOutcome.PASSED or probe.unmonitored:
            seen.failures.append(f"{gpu.uuid}: {probe.outcome}: {probe.text}{probe.unmonitored}")
    seen.scans += 1
    if (await driver.scan()).gpus != scan.gpus:
        seen.failures.append("a scan found other GPUs than before")


async def test_a_gpu_says_what_it_is_and_stays_the_same_through_a_watch(request, capsys):
    seconds = float(request.config.getoption("--gpu-watch"))
    async with open_real_driver() as (driver, scan):
        with capsys.disabled():
            say(await description(driver, scan))
        seen = await watch(driver, scan, seconds)
        after = await driver.scan()
        threads = [thread.name for thread in threading.enumerate() if "nvml" in thread.name]
        with capsys.disabled():
            say([f"watched for {seconds:g} s:", *lines_of(seen)])

    assert [] == seen.failures
    assert scan == after
    assert {"nvml calls", "nvml-events"} >= set(threads)
    async with open_real_driver() as (_, again):
        assert scan == again
