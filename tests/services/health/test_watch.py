"""Health: driver events and probes become verdicts, quickly, once, and per GPU."""

import asyncio

import pytest
import structlog

from agent.errors import DriverError
from agent.health.watch import MOST_STRANGE
from agent.model import Condition, DriverEvent, EventKind, ProbeOutcome
from tests.builders import a_health, a_uuid
from tests.services.health.watching import G0, G1, G2, HealthBench, running

XID = DriverEvent(EventKind.XID, G1, 48)


async def test_healthy_gpus_are_probed_every_ten_seconds_and_nothing_is_published():
    async with running() as bench:
        await asyncio.sleep(25)

    assert [G0, G1, G2] * 3 == bench.driver.probes
    assert ([], 1) == (bench.verdicts, bench.inventory.value.generation)


async def test_a_critical_xid_is_judged_within_milliseconds():
    async with running() as bench:
        before = asyncio.get_running_loop().time()
        bench.driver.xid(G1, 79)
        await bench.inventory.until(lambda inventory: inventory.generation == 2)

        assert asyncio.get_running_loop().time() <= before + 0.005001
        assert ["ok", "bad", "ok"] == bench.conditions
        assert 79 == bench.memory[G1].xid


async def test_after_a_bad_event_the_gpus_are_asked_at_once():
    async with running() as bench:
        bench.driver.outcomes[G1] = ProbeOutcome.LOST
        bench.driver.xid(G1, 79)
        await asyncio.sleep(0.2)

        assert ["ok", "lost", "ok"] == bench.conditions


async def test_an_application_xid_is_counted_and_changes_nothing():
    async with running() as bench:
        bench.driver.xid(G0, 31)
        await asyncio.sleep(1)

    assert ([], (((G0, "31"), 1),)) == (bench.verdicts, bench.watch.xid_events.items())


async def test_an_xid_of_no_named_gpu_makes_all_watched():
    async with running() as bench:
        bench.driver.xid(None, 48)
        await asyncio.sleep(0.1)

    assert (["watch"] * 3, (("unknown", "48"),)) == (
        bench.conditions,
        tuple(labels for labels, _ in bench.watch.xid_events.items()),
    )


async def test_a_change_of_the_layout_asks_for_a_scan_and_probes():
    async with running() as bench:
        asked = len(bench.driver.probes)
        bench.driver.report(DriverEvent(EventKind.CHANGED))
        await asyncio.sleep(0.1)

        assert (1, asked + 3) == (bench.scans_wanted, len(bench.driver.probes))


async def test_a_gpu_whose_probe_does_not_come_back_is_unmonitored_and_the_others_are_not():
    async with running() as bench:
        bench.driver.outcomes[G2] = ProbeOutcome.SILENT
        bench.driver.report(DriverEvent(EventKind.CHANGED))
        await asyncio.sleep(4.1)

        assert ["ok", "ok", "unmonitored"] == bench.conditions
        assert bench.of(G2).serving


async def test_a_hung_driver_is_served_for_exactly_a_minute_and_back_when_it_answers():
    async with running() as bench:
        bench.driver.hung = True
        bench.driver.report(DriverEvent(EventKind.CHANGED))
        await asyncio.sleep(4.5)
        since = bench.of(G0).since
        assert ["unmonitored"] * 3 == bench.conditions
        await asyncio.sleep(59.4)
        assert bench.of(G0).serving
        await asyncio.sleep(0.2)
        assert [False] * 3 == [bench.of(uuid).serving for uuid in (G0, G1, G2)]
        assert since == bench.of(G0).since
        bench.driver.hung = False
        await asyncio.sleep(13)

        assert (["ok"] * 3, True) == (bench.conditions, bench.of(G0).serving)


async def test_a_driver_that_only_fails_is_as_silent_as_a_hung_one():
    async with running() as bench:
        bench.driver.failure = DriverError("it is gone")
        bench.driver.report(DriverEvent(EventKind.CHANGED))
        await asyncio.sleep(0.1)

        assert ["unmonitored"] * 3 == bench.conditions
        assert "it is gone" in bench.of(G0).text


async def test_without_events_no_probe_makes_a_gpu_healthy_until_the_stream_holds():
    async with running() as bench:
        bench.driver.break_events()
        await asyncio.sleep(0.3)
        bench.driver.report(DriverEvent(EventKind.CHANGED))
        await asyncio.sleep(4.9)
        assert ["unmonitored"] * 3 == bench.conditions
        await asyncio.sleep(20)

        assert (["ok"] * 3, 2) == (bench.conditions, bench.driver.streams)


async def test_a_stream_that_ends_or_breaks_after_a_good_while_is_opened_again_at_once():
    async with running() as bench:
        for end in (bench.driver.break_events, bench.driver.end_events, bench.driver.end_events):
            end()
            await asyncio.sleep(0.6)
        assert 3 == bench.driver.streams  # at 0, 0.5 and 1.5
        await asyncio.sleep(20)
        bench.driver.end_events()
        await asyncio.sleep(0.6)

        assert 5 == bench.driver.streams


@pytest.mark.parametrize("grave", [XID, DriverEvent(EventKind.ECC_DOUBLE, G1)])
@pytest.mark.parametrize("uuids", [[G0], [a_uuid(n) for n in range(100, 100 + MOST_STRANGE)]])
async def test_no_number_of_different_reports_pushes_a_grave_one_out(uuids, grave):
    async with running() as bench:
        for number in range(2 * MOST_STRANGE):
            bench.driver.xid(uuids[number % len(uuids)], 1000 + number)
        bench.driver.report(grave)
        await asyncio.sleep(0.1)

    counts = dict(bench.watch.xid_events.items())
    assert len(counts) <= 3, "a driver that invents numbers and GPUs makes no series for each"
    assert 2 * MOST_STRANGE <= sum(counts.values())
    assert bench.of(G1).needs_reset


async def test_xids_of_one_class_are_judged_by_the_first_and_each_class_for_itself():
    async with running() as bench:
        for number in (31, 94, 54, 1000, 79, 48):
            bench.driver.xid(G0, number)
        await asyncio.sleep(0.1)

    assert (79, True) == (bench.of(G0).xid, bench.of(G0).needs_reset)


async def test_a_stream_that_keeps_breaking_is_opened_again_after_growing_delays():
    async with running() as bench:
        bench.driver.failure = DriverError("no events")
        bench.driver.break_events()
        await asyncio.sleep(31.6)  # after 0.5, 1, 2, 4, 8, 16 s: at 0.5, 1.5, 3.5, 7.5, 15.5, 31.5

        assert 7 == bench.driver.streams


@pytest.mark.parametrize(("booted", "condition"), [(False, "bad"), (True, "ok")])
async def test_what_was_recalled_is_known_before_the_first_scan(booted, condition):
    ill = a_health(condition=Condition.BAD, cause="xid", xid=48)
    bench = HealthBench(recalled={G1: ill}, boot_changed=booted)

    assert ["ok", condition, "ok"] == bench.conditions
    assert [{G1}] == [verdict.keys() for verdict in bench.verdicts]


async def test_one_line_is_logged_per_change():
    with structlog.testing.capture_logs() as lines:
        async with running() as bench:
            for _ in range(5):
                bench.driver.xid(G0, 95)
                await asyncio.sleep(2)

    events = [line for line in lines if line["event"] == "gpu.health"]
    assert [("ok", "bad", G0)] == [(e["was"], e["condition"], e["gpu"]) for e in events]
