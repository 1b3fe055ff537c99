"""Samples: the newest use of each GPU, and no GPU that is not well is asked."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from agent.allocate.service import AllocateStep
from agent.errors import DriverError, StateError
from agent.inventory import LEAST, SAMPLE_PERIOD, Discovery, NodeCheck, Samples, Withholder
from agent.kit.cell import Cell
from agent.model import (
    Cause,
    Condition,
    GpuFault,
    GpuSample,
    GpuUuid,
    Inventory,
    ProbeOutcome,
    Scan,
    Trouble,
)
from tests.builders import a_gpu, a_health, a_shared_gpu, a_uuid, an_inventory
from tests.fakes.driver import ScriptedDriver
from tests.services.at_work import at_work

G0, G1 = a_uuid(0), a_uuid(1)
SILENT = msgspec.structs.replace(a_health(condition=Condition.UNMONITORED), cause=Cause.DRIVER)
LOST = a_health(condition=Condition.LOST)
BAD = a_health(condition=Condition.BAD)


class CountingDriver(ScriptedDriver):
    """Tells how often each GPU was asked, and that each is used more every time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[GpuUuid, int] = {}

    async def sample(self, uuid: GpuUuid) -> GpuSample:
        self.asked[uuid] = self.asked.get(uuid, 0) + 1
        await super().sample(uuid)
        return self.samples.get(uuid, GpuSample(uuid, 10, 5, self.asked[uuid]))


class SamplesBench:
    """Samples of two GPUs."""

    def __init__(self) -> None:
        self.driver = CountingDriver()
        self.inventory: Cell[Inventory] = Cell(an_inventory(count=2))
        self.samples = Samples(self.driver, self.inventory)

    def show(self, *healths, **of_all) -> None:
        """GPUs 0, 1, … are so."""
        gpus = [
            a_shared_gpu(gpu=a_gpu(index=n), health=one, **of_all) for n, one in enumerate(healths)
        ]
        generation = self.inventory.value.generation + 1
        self.inventory.set(an_inventory(gpus=gpus, generation=generation))


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[SamplesBench]:
    bench = SamplesBench()
    async with at_work(bench.samples.run):
        await asyncio.sleep(0.001)
        yield bench


@pytest.mark.parametrize(
    ("health", "of_all", "is_asked"),
    [
        (SILENT, {}, False),
        (LOST, {}, False),
        (a_health(), {"present": False, "there": False}, False),
        (BAD, {"present": False}, True),  # it may be filtered out and in use
    ],
    ids=["silent", "lost", "gone but held", "bad"],
)
async def test_a_gpu_that_cannot_answer_is_left_alone_until_it_can(health, of_all, is_asked):
    async with running() as bench:
        bench.show(health, **of_all)
        await asyncio.sleep(10 * SAMPLE_PERIOD)
        assert (11 if is_asked else 1) == bench.driver.asked[G0]
        before = bench.driver.asked[G0]
        bench.show(a_health(), a_health())
        await asyncio.sleep(SAMPLE_PERIOD)

        assert before + 1 == bench.driver.asked[G0]
        assert bench.samples.newest(G0)


@pytest.mark.parametrize("outcome", [ProbeOutcome.SILENT, ProbeOutcome.FAILED, ProbeOutcome.LOST])
async def test_a_gpu_that_fails_costs_the_others_nothing(outcome):
    async with running() as bench:
        bench.driver.outcomes[G0] = outcome
        await asyncio.sleep(10 * SAMPLE_PERIOD)

    assert 11 == bench.driver.asked[G1]
    assert bench.samples.newest(G0) is None
    assert bench.samples.newest(G1)


# Scans: at start, on demand, every minute; a driver that fails costs nothing that was found.


@asynccontextmanager
async def discovering(driver: ScriptedDriver):
    """A discovery that runs, and the moments at which it handed on a scan."""
    found: list[float] = []
    loop = asyncio.get_running_loop()
    start = loop.time()

    def take(scan: Scan) -> None:
        assert tuple(driver.gpus) == scan.gpus
        found.append(round(loop.time() - start, 3))

    discovery = Discovery(driver, take, ill=lambda _: False)
    async with at_work(discovery.run):
        yield discovery, found


async def test_a_driver_that_fails_is_asked_after_1_2_4_up_to_30_s_and_at_once_on_demand():
    asked, loop = list[float](), asyncio.get_running_loop()
    start = loop.time()

    class Failing(ScriptedDriver):
        async def scan(self) -> Scan:
            asked.append(round(loop.time() - start, 3))
            raise DriverError("Unknown Error")

    discovery = Discovery(Failing(), lambda _: None, ill=lambda _: False)
    async with at_work(discovery.run):
        await asyncio.sleep(5)
        discovery.rescan()
        await asyncio.sleep(85)

    assert [0, 1, 3, 5, 9, 17, 33, 63] == asked


@pytest.mark.parametrize("trouble", Trouble)
async def test_a_gpu_for_which_the_driver_fails_is_asked_for_sooner_than_one_that_needs_a_hand(
    trouble,
):
    driver = ScriptedDriver()
    driver.faults = [GpuFault("index 0", "Unknown Error", trouble)]
    async with discovering(driver) as (_, found):
        await asyncio.sleep(4)
        driver.faults, driver.gpus = [], [a_gpu()]
        await asyncio.sleep(130)

    may_pass = trouble in {Trouble.LOST, Trouble.FAILED}
    assert [0, *((1, 3, 7) if may_pass else ()), 60, 120] == found


async def test_a_storm_of_refusals_makes_two_looks_a_second_and_changes_the_list_no_oftener():
    """The scenes of what is looked at are those of tests/app."""
    looks, changes = 0, []

    async def check() -> None:
        nonlocal looks
        looks += 1
        if looks % 2:
            raise StateError("/state is full.")

    place = NodeCheck(AllocateStep.WRITE, check)
    withholder = Withholder((place,), changes.append, lambda _: None)
    async with at_work(withholder.run):
        await asyncio.sleep(1)
        before = looks
        for _ in range(1000):
            withholder.look()
            await asyncio.sleep(0.01)

    assert 2 < looks - before <= 10 / LEAST + 1
    assert 2 < len(changes) <= looks


async def test_a_look_that_hangs_is_a_reason_and_holds_up_no_other_one():
    answers, looks, changes = asyncio.Event(), 0, []

    async def hang() -> None:
        await answers.wait()

    async def count() -> None:
        nonlocal looks
        looks += 1

    checks = NodeCheck(AllocateStep.WRITE, hang), NodeCheck(AllocateStep.HOOK, count)
    withholder = Withholder(checks, changes.append, lambda _: None)
    async with at_work(withholder.run):
        await asyncio.sleep(60)
        (reason,) = withholder.reasons.value
        assert "the disk has not answered in time" in reason
        assert looks > 60  # while slices are withheld it looks often
        answers.set()
        await asyncio.sleep(0.01)

    assert [reason, ""] == changes
