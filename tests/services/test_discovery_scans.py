"""Scans: at start, on demand, every minute; a driver that fails costs nothing that was found."""

import asyncio
from contextlib import asynccontextmanager

from agent.core.errors import DriverError, DriverMissing
from agent.core.gpu import Scan
from agent.services.discovery import Discovery
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

    assert [0, 7, 67] == moments(found)


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
