"""A driver that fails alike for all GPUs condemns none; another session is tried once."""

import asyncio

import pytest

from agent.errors import DriverError
from agent.inventory import Discovery
from agent.model import GpuFault, ProbeOutcome, Scan, Trouble
from tests.builders import a_gpu
from tests.fakes.driver import ScriptedDriver
from tests.services.at_work import at_work
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
    async with at_work(discovery.run):
        await asyncio.sleep(seconds)
    return discovery, found


@pytest.mark.parametrize(
    ("gpus", "changes", "problem"),
    [
        ([], {"faults": faults(G0, G1)}, "the driver reports the same for all GPUs: Unknown Error"),
        ([a_gpu()], {"failure": DriverError("Unknown Error")}, "Unknown Error"),
    ],
    ids=["all fail alike", "the new session fails"],
)
async def test_a_scan_that_says_nothing_of_one_gpu_is_the_drivers_failure(gpus, changes, problem):
    driver = ScriptedDriver(gpus)
    vars(driver).update(changes)
    discovery, found = await looked_at(driver, 5)

    assert ([], problem) == (found, discovery.problem.value)


@pytest.mark.parametrize(
    ("mended", "trouble", "seconds", "lost"),
    [(True, Trouble.FAILED, 5, []), (False, Trouble.LOST, 0.5, [True])],
    ids=["mended by it", "at fault itself"],
)
async def test_a_scan_is_repeated_in_another_session_before_it_counts(
    mended, trouble, seconds, lost
):
    driver = ScriptedDriver()
    driver.renewable, driver.mended_by_renewal = True, mended
    driver.faults = faults(G0, trouble=trouble)
    _, found = await looked_at(driver, seconds)

    assert [lost] == [[fault.lost for fault in scan.faults] for scan in found]
    assert 1 == driver.renewals
