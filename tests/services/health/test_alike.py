"""A driver that fails alike for all GPUs condemns none; another session is tried once."""

import asyncio

import pytest

from agent.errors import DriverError
from agent.inventory import Discovery
from agent.model import GpuFault, ProbeOutcome, Scan, Trouble
from tests.builders import a_gpu
from tests.fakes.driver import ScriptedDriver
from tests.services.health.watching import G0, G1, G2, running

ALL = (G0, G1, G2)


class Breaking(ScriptedDriver):
    """Fails as a whole behind the next probe of `last_well`, once that is set."""

    last_well = None

    async def probe(self, uuid):
        probe = await super().probe(uuid)
        if uuid == self.last_well:
            self.last_well = None
            self.outcomes = dict.fromkeys(ALL, ProbeOutcome.LOST)
        return probe


@pytest.mark.parametrize("last_well", [G0, G1])
async def test_a_driver_that_fails_in_the_middle_of_a_round_condemns_no_gpu(last_well):
    async with running(driver=Breaking()) as bench:
        await asyncio.sleep(1)
        bench.driver.last_well = last_well
        await asyncio.sleep(20)
        during = bench.conditions
        bench.driver.outcomes = {}
        await asyncio.sleep(11)

        assert ["unmonitored"] * 3 == during
        assert ["ok"] * 3 == bench.conditions


async def test_a_recheck_of_one_gpu_condemns_it_for_nothing_that_all_say():
    async with running() as bench:
        await asyncio.sleep(1)
        bench.driver.outcomes = dict.fromkeys(ALL, ProbeOutcome.LOST)
        found = await bench.watch.recheck("1")

        assert found
        assert ("unmonitored", True) == (found.after.condition.value, found.serving)
        assert "the driver reports the same for all GPUs" in found.after.text


def faults(*uuids, trouble=Trouble.FAILED) -> list[GpuFault]:
    return [GpuFault(uuid, "Unknown Error", trouble) for uuid in uuids]


async def looked_at(driver: ScriptedDriver, seconds: float) -> tuple[Discovery, list[Scan]]:
    found: list[Scan] = []
    discovery = Discovery(driver, found.append)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(discovery.run())
        await asyncio.sleep(seconds)
        task.cancel()
    return discovery, found


async def test_a_scan_in_which_all_fail_alike_is_the_drivers_failure():
    driver = ScriptedDriver()
    driver.faults = faults(G0, G1)
    discovery, found = await looked_at(driver, 5)

    assert [] == found
    assert "the driver reports the same for all GPUs: Unknown Error" == discovery.problem.value


async def test_a_scan_is_repeated_in_another_session_before_it_counts():
    driver = ScriptedDriver()
    driver.renewable = driver.mended_by_renewal = True
    driver.faults = faults(G0)
    _, found = await looked_at(driver, 5)

    assert [()] == [scan.faults for scan in found]
    assert 1 == driver.renewals


async def test_a_single_gpu_that_fails_in_the_other_session_too_is_at_fault_itself():
    driver = ScriptedDriver()
    driver.renewable = True
    driver.faults = faults(G0, trouble=Trouble.LOST)
    _, found = await looked_at(driver, 0.5)

    assert [True] == [scan.faults[0].lost for scan in found]


async def test_a_driver_that_fails_in_the_new_session_is_the_failure():
    driver = ScriptedDriver([a_gpu()])
    driver.failure = DriverError("Unknown Error")
    discovery, found = await looked_at(driver, 5)

    assert [] == found
    assert "Unknown Error" == discovery.problem.value
