"""Storms: few lists, few lines, right counts."""

import asyncio

import pytest
import structlog

from agent.health.watch import MOST_KNOWN
from agent.model import DriverEvent, EventKind, GpuUuid, ProbeOutcome
from tests.builders import a_uuid
from tests.services.health.watching import G0, G1, G2, running

STORM, TICKS = 10_000, 1_000


async def storm(bench, *xids: tuple[GpuUuid, int], seconds: int = 1) -> None:
    """10,000 XIDs a second, of each in turn, a few in each millisecond."""
    events = [DriverEvent(EventKind.XID, uuid, number) for uuid, number in xids]
    for tick in range(TICKS * seconds):
        first = tick * STORM // TICKS
        bench.driver.report(
            *(events[n % len(events)] for n in range(first, first + STORM // TICKS))
        )
        await asyncio.sleep(1 / TICKS)
    await asyncio.sleep(0.2)


async def test_a_storm_of_one_gpu_is_one_list_and_every_xid_is_counted():
    async with running() as bench:
        before = bench.slices.value.generation
        await storm(bench, (G0, 48), seconds=3)

        assert before + 1 == bench.slices.value.generation
        assert (((G0, "48"), 3 * STORM),) == bench.watch.xid_events.items()
        assert (((G0, "ok", "bad"), 1),) == bench.watch.transitions.items()
        assert ["bad", "ok", "ok"] == bench.conditions
        assert len(bench.verdicts) <= 8


async def test_a_storm_of_all_gpus_is_one_list():
    async with running() as bench:
        before = bench.slices.value.generation
        await storm(bench, (G0, 48), (G1, 79), (G2, 31), (G2, 119))

        assert before + 1 == bench.slices.value.generation
        assert ["bad"] * 3 == bench.conditions
        assert STORM == sum(count for _, count in bench.watch.xid_events.items())


@pytest.mark.parametrize(
    ("xid", "pause", "lists"),
    [(79, 0.001, 1), (48, 0.012, 2)],  # the second one comes too late for the first list
)
async def test_gpus_that_are_struck_one_after_the_other_are_one_list_for_each_window(
    xid, pause, lists
):
    async with running() as bench:
        before = bench.slices.value.generation
        for uuid in (G0, G1, G2):
            bench.driver.xid(uuid, xid)
            await asyncio.sleep(pause)
        await asyncio.sleep(0.2)

        assert before + lists == bench.slices.value.generation
        assert ["bad"] * 3 == bench.conditions


async def test_a_storm_is_one_line_a_second_and_says_how_many_were_left_out():
    with structlog.testing.capture_logs() as lines:
        async with running() as bench:
            await storm(bench, (G0, 31), seconds=3)

    told = [line["suppressed"] for line in lines if line["event"] == "gpu.xid"]
    assert 4 <= len(told) <= 5
    assert [0, 0] == told[:2]
    assert STORM - STORM // 100 <= told[2] <= STORM + STORM // 100


async def test_the_first_xid_of_each_number_on_each_gpu_has_its_line():
    with structlog.testing.capture_logs() as lines:
        async with running() as bench:
            for _ in range(2):
                for uuid, number in ((G0, 31), (G0, 13), (G1, 31), (G0, 43), (G1, 13)):
                    bench.driver.xid(uuid, number)
                    await asyncio.sleep(0.01)

    told = [(line["gpu"], line["xid"]) for line in lines if line["event"] == "gpu.xid"]
    assert [(G0, 31), (G0, 13), (G1, 31), (G0, 43), (G1, 13)] == told[:5]
    assert len(told) <= 6


async def test_gpus_that_are_lost_one_after_the_other_within_a_round_are_one_list():
    async with running() as bench:
        before = bench.slices.value.generation
        bench.driver.outcomes = dict.fromkeys((G0, G1), ProbeOutcome.LOST)
        bench.driver.report(DriverEvent(EventKind.CHANGED))
        await asyncio.sleep(0.3)

        assert before + 1 == bench.slices.value.generation
        assert ["lost", "lost", "ok"] == bench.conditions


async def test_a_driver_that_invents_gpus_fills_no_memory():
    async with running() as bench:
        for number in range(3, MOST_KNOWN + 50):
            bench.driver.xid(a_uuid(number), 48)
        await asyncio.sleep(0.1)
        bench.driver.xid(G0, 48)
        await asyncio.sleep(0.1)

        assert MOST_KNOWN < len(bench.memory) + 3
        assert len(bench.memory) <= MOST_KNOWN + 3
        assert "bad" == bench.conditions[0]
