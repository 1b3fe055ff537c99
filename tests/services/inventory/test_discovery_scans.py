"""Scans: at start, on demand, every minute; a driver that fails costs nothing that was found."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from agent.errors import DriverError, DriverMissing
from agent.inventory import Discovery
from agent.model import GpuFault, Scan, Trouble
from tests.builders import a_gpu
from tests.fakes.driver import ScriptedDriver


@asynccontextmanager
async def running(driver: ScriptedDriver):
    """A discovery that runs, and the scans that it handed on with their moments."""
    found: list[tuple[float, Scan]] = []
    loop = asyncio.get_running_loop()
    start = loop.time()
    discovery = Discovery(driver, lambda scan: found.append((loop.time() - start, scan)))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(discovery.run())
        yield discovery, found
        task.cancel()


def moments(found) -> list[float]:
    return [round(moment, 3) for moment, _ in found]


async def test_it_scans_at_once_and_every_minute():
    async with running(ScriptedDriver([a_gpu()])) as (discovery, found):
        await asyncio.sleep(125)

    assert [0, 60, 120] == moments(found)
    assert (a_gpu(),) == found[0][1].gpus
    assert discovery.problem.value is None


async def test_a_wish_to_scan_is_granted_at_once_and_several_wishes_by_one_scan():
    async with running(ScriptedDriver()) as (discovery, found):
        await asyncio.sleep(7)
        discovery.rescan()
        discovery.rescan()
        await asyncio.sleep(60.5)

    assert [0, 7, 60] == moments(found)


async def test_a_missing_driver_is_asked_for_again_after_growing_delays():
    driver = ScriptedDriver()
    driver.failure = DriverMissing("no library")
    async with running(driver) as (discovery, found):
        assert "not been asked" in (discovery.problem.value or "")
        await asyncio.sleep(62.5)
        assert ("no library", []) == (discovery.problem.value, found)
        driver.failure = None
        await asyncio.sleep(30)

    assert [91] == moments(found)  # tried at 0, 1, 3, 7, 15, 31, 61, 91
    assert discovery.problem.value is None


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

    assert [1.6] == moments(found)


@pytest.mark.parametrize("trouble", [Trouble.LOST, Trouble.FAILED])
async def test_a_gpu_for_which_the_driver_fails_is_asked_for_again_after_growing_delays(trouble):
    driver = ScriptedDriver()
    driver.faults = [GpuFault("index 0", "Unknown Error", trouble)]
    async with running(driver) as (_, found):
        await asyncio.sleep(4)
        driver.faults, driver.gpus = [], [a_gpu()]
        await asyncio.sleep(130)

    assert [0, 1, 3, 7, 60, 120] == moments(found)


@pytest.mark.parametrize("trouble", sorted(set(Trouble) - {Trouble.LOST, Trouble.FAILED}))
async def test_a_gpu_that_needs_somebodys_hand_is_asked_for_every_minute(trouble):
    driver = ScriptedDriver()
    driver.faults = [GpuFault("index 0", "in use", trouble)]
    async with running(driver) as (_, found):
        await asyncio.sleep(61)

    assert [0, 60] == moments(found)


async def test_after_a_success_the_delays_start_over():
    driver = ScriptedDriver()
    async with running(driver) as (discovery, found):
        await asyncio.sleep(59)
        driver.failure = DriverError("oops")
        await asyncio.sleep(1.5)
        assert "oops" == discovery.problem.value
        driver.failure = None
        await asyncio.sleep(1)

    assert [0, 61] == moments(found)


async def test_a_scan_that_hangs_is_given_up():
    driver = ScriptedDriver()
    driver.hung = True
    async with running(driver) as (discovery, found):
        await asyncio.sleep(10.5)
        assert "did not answer" in (discovery.problem.value or "")
        driver.hung = False
        await asyncio.sleep(1)

    assert [11] == moments(found)
