"""Scans: at start, on demand, every minute; a driver that fails costs nothing that was found."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from agent.errors import DriverError, DriverMissing
from agent.inventory import Discovery
from agent.model import GpuFault, Scan, Trouble
from tests.builders import a_gpu
from tests.fakes.driver import ScriptedDriver
from tests.services.at_work import at_work


@asynccontextmanager
async def running(driver: ScriptedDriver):
    """A discovery that runs, and the moments at which it handed on a scan."""
    found: list[float] = []
    loop = asyncio.get_running_loop()
    start = loop.time()

    def take(scan: Scan) -> None:
        assert tuple(driver.gpus) == scan.gpus
        found.append(round(loop.time() - start, 3))

    discovery = Discovery(driver, take)
    async with at_work(discovery.run):
        yield discovery, found


async def test_it_scans_at_once_every_minute_and_on_demand_once_for_several_wishes():
    async with running(ScriptedDriver([a_gpu()])) as (discovery, found):
        await asyncio.sleep(7)
        assert discovery.problem.value is None
        discovery.rescan()
        discovery.rescan()
        await asyncio.sleep(120)

    assert [0, 7, 60, 120] == found


@pytest.mark.parametrize(
    ("failure", "problem", "back"),
    [
        (DriverMissing("no library"), "no library", 91),  # tried at 0, 1, 3, 7, 15, 31, 61, 91
        (None, "did not answer", 81),  # 0, 11, 23, 37 and 55 hang for 10 s each
    ],
)
async def test_a_driver_that_fails_or_hangs_is_asked_again_after_growing_delays(
    failure, problem, back
):
    driver = ScriptedDriver()
    driver.failure, driver.hung = failure, failure is None
    async with running(driver) as (discovery, found):
        assert "not been asked" in (discovery.problem.value or "")
        await asyncio.sleep(62.5)
        assert problem in (discovery.problem.value or "")
        assert [] == found
        driver.failure, driver.hung = None, False
        await asyncio.sleep(30)

    assert ([back], None) == (found, discovery.problem.value)


async def test_a_wish_while_the_driver_fails_makes_no_delay_longer():
    driver = ScriptedDriver()
    driver.failure = DriverError("oops")
    async with running(driver) as (discovery, found):
        for _ in range(3):
            await asyncio.sleep(0.2)
            discovery.rescan()
        await asyncio.sleep(0.1)
        driver.failure = None
        await asyncio.sleep(1.2)

    assert [1.6] == found


async def test_after_a_success_the_delays_start_over():
    driver = ScriptedDriver()
    async with running(driver) as (discovery, found):
        await asyncio.sleep(59)
        driver.failure = DriverError("oops")
        await asyncio.sleep(1.5)
        assert "oops" == discovery.problem.value
        driver.failure = None
        await asyncio.sleep(1)

    assert [0, 61] == found


@pytest.mark.parametrize("trouble", Trouble)
async def test_a_gpu_for_which_the_driver_fails_is_asked_for_sooner_than_one_that_needs_a_hand(
    trouble,
):
    driver = ScriptedDriver()
    driver.faults = [GpuFault("index 0", "Unknown Error", trouble)]
    async with running(driver) as (_, found):
        await asyncio.sleep(4)
        driver.faults, driver.gpus = [], [a_gpu()]
        await asyncio.sleep(130)

    may_pass = trouble in {Trouble.LOST, Trouble.FAILED}
    assert [0, *((1, 3, 7) if may_pass else ()), 60, 120] == found
