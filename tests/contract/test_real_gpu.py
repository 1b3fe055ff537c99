"""A real GPU, where there is one: what it says of itself, a long watch, and the same GPU after it.

What it says is printed, so that it can be kept: `make test-gpu WATCH=300`.
"""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from agent.gpu.driver import NvmlDriver
from agent.model import ProbeOutcome, Scan
from tests.contract.real_driver import open_real_driver

pytestmark = [pytest.mark.gpu, pytest.mark.looptime(False), pytest.mark.timeout(24 * 3600)]

SAMPLE_PERIOD = 1.0
PROBED = 10
"""Every so many samples the GPUs are probed and looked for."""


async def description(driver: NvmlDriver, scan: Scan) -> AsyncIterator[object]:
    """Everything that the driver says."""
    yield f"driver {scan.driver_version}, {scan.faults}"
    for gpu in scan.gpus:
        probe, sample = await driver.probe(gpu.uuid), await driver.sample(gpu.uuid)
        for value in (gpu, probe.signs, sample):
            yield value


async def watched(driver: NvmlDriver, scan: Scan, seconds: float) -> tuple[list[object], int]:
    """The events and the troubles of so long, sampled and probed as the agent does; how often."""
    told, rounds, loop = list[object](), 0, asyncio.get_running_loop()
    end = loop.time() + seconds

    async def listen() -> None:
        async for event in driver.events():
            told.append(event)

    async with asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(listen())
        while loop.time() < end:
            for gpu in scan.gpus:
                await driver.sample(gpu.uuid)
                if rounds % PROBED == 0:
                    probe = await driver.probe(gpu.uuid)
                    told += [probe] * (probe.outcome is not ProbeOutcome.PASSED)
                    told += [probe] * bool(probe.unmonitored)
            if rounds % PROBED == 0:
                assert scan == await driver.scan()
            rounds += 1
            await asyncio.sleep(SAMPLE_PERIOD)
        listening.cancel()
    return told, rounds


async def test_a_gpu_says_what_it_is_and_stays_the_same_through_a_watch(request, capsys):
    async with open_real_driver() as (driver, scan):
        said = [str(line) async for line in description(driver, scan)]
        told, rounds = await watched(driver, scan, float(request.config.getoption("--gpu-watch")))
        threads = {one.name for one in threading.enumerate() if "nvml" in one.name}
        with capsys.disabled():
            print("", *said, f"watched in {rounds} rounds, and was told: {told}", sep="\n")  # noqa: T201
        assert scan == await driver.scan()
    assert [] == [one for one in told if not hasattr(one, "kind")]
    assert {"nvml calls", "nvml-events"} >= threads
    async with open_real_driver() as (_, again):
        assert scan == again
