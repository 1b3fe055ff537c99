"""Health: errors that name no GPU, and GPUs that the driver lists no more."""

import asyncio

import pytest

from agent.model import DriverEvent, EventKind, GpuFault, GpuSigns, ProbeOutcome, Scan
from tests.builders import a_gpu
from tests.services.health.watching import G0, G1, G2, HealthBench, running

GPUS = tuple(a_gpu(index=n) for n in range(3))
WITHOUT_G2 = Scan("560.1", GPUS[:2])
ALL = Scan("560.1", GPUS)
LONG = 10_000.0
"""Seconds, longer than any rest."""


def scanned(bench: HealthBench, scan: Scan) -> None:
    bench.keeper.found(scan)
    bench.watch.scanned(scan)


def counting(bench: HealthBench, *counts: int) -> None:
    for uuid, count in zip((G0, G1, G2), counts, strict=True):
        bench.driver.signs[uuid] = GpuSigns(ecc_uncorrected=count)


async def test_a_memory_error_that_names_no_gpu_makes_all_watched_and_asked_at_once():
    async with running() as bench:
        asked = len(bench.driver.probes)
        bench.driver.report(DriverEvent(EventKind.ECC_DOUBLE, None))
        await asyncio.sleep(0.2)

        assert ["watch"] * 3 == bench.conditions
        assert asked + 3 <= len(bench.driver.probes)
        await asyncio.sleep(700)
        assert ["ok"] * 3 == bench.conditions


@pytest.mark.parametrize("lead", [0.2, -0.2], ids=["count first", "event first"])
async def test_the_gpu_whose_count_rose_is_the_one_that_the_driver_could_not_name(lead):
    async with running() as bench:
        counting(bench, 4, 0, 1)
        await asyncio.sleep(30)
        if lead < 0:
            bench.driver.report(DriverEvent(EventKind.ECC_DOUBLE, None))
            await asyncio.sleep(-lead)
        counting(bench, 4, 1, 1)
        await asyncio.sleep(11)
        if lead > 0:
            bench.driver.report(DriverEvent(EventKind.ECC_DOUBLE, None))
            await asyncio.sleep(11)

        assert ["watch", "bad", "watch"] == bench.conditions
        assert bench.of(G1).needs_reset


async def test_a_count_that_rises_alone_judges_nothing():
    async with running() as bench:
        counting(bench, 0, 0, 0)
        await asyncio.sleep(30)
        counting(bench, 0, 1, 0)
        await asyncio.sleep(30)

        assert ["ok"] * 3 == bench.conditions


async def test_a_gpu_that_was_listed_no_more_and_is_again_was_away():
    async with running() as bench:
        bench.driver.xid(G2, 48)
        await asyncio.sleep(30)
        scanned(bench, WITHOUT_G2)
        await asyncio.sleep(1)
        assert "lost" == bench.watch._of(G2).condition
        scanned(bench, ALL)
        await asyncio.sleep(30)
        assert ("bad", False) == (bench.conditions[2], bench.of(G2).needs_reset)
        await asyncio.sleep(700)

        assert ["ok"] * 3 == bench.conditions


async def test_one_that_reported_while_nobody_listed_it_has_reported_an_echo():
    async with running() as bench:
        bench.driver.xid(G2, 79)
        await asyncio.sleep(1)
        scanned(bench, WITHOUT_G2)
        await asyncio.sleep(1)
        bench.driver.xid(G2, 154)
        bench.driver.xid(G2, 79)
        await asyncio.sleep(1)
        scanned(bench, WITHOUT_G2)
        await asyncio.sleep(1)
        scanned(bench, ALL)
        await asyncio.sleep(30)

        assert not bench.of(G2).needs_reset


@pytest.mark.parametrize(
    "scan", [Scan("560.1", GPUS[:2], (GpuFault("index 2", "Unknown Error"),)), None]
)
async def test_a_scan_that_does_not_tell_who_is_missing_credits_nobody(scan):
    async with running() as bench:
        bench.driver.xid(G2, 48)
        await asyncio.sleep(1)
        if scan is None:  # the driver is unloaded, and loaded again
            bench.driver.outcomes = dict.fromkeys((G0, G1, G2), ProbeOutcome.SILENT)
            await asyncio.sleep(90)
            bench.driver.outcomes.clear()
        else:
            scanned(bench, scan)
        await asyncio.sleep(1)
        scanned(bench, ALL)
        await asyncio.sleep(LONG)

        assert ("bad", True) == (bench.conditions[2], bench.of(G2).needs_reset)
