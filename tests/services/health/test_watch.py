"""What becomes of three GPUs, by what the driver reports and how their probes end."""

import asyncio
import re
from pathlib import Path

import pytest
import structlog

from agent.errors import DriverError
from agent.health.watch import MOST_STRANGE, OPENING
from agent.model import (
    Condition,
    DriverEvent,
    EventKind,
    GpuFault,
    GpuSigns,
    Health,
    ProbeOutcome,
    Scan,
    Trouble,
)
from tests.builders import a_gpu, a_health, a_uuid
from tests.services.at_work import at_work
from tests.services.health.watching import G0, G1, G2, HealthBench, running

ALL = (G0, G1, G2)
GPUS = tuple(a_gpu(index=n) for n in range(3))
FAULT = GpuFault("index 2", "Unknown Error")
LOST = GpuFault(G1, "GPU is lost", Trouble.LOST)
DEEDS = {
    "changed": lambda bench: bench.driver.report(DriverEvent(EventKind.CHANGED)),
    "ecc?": lambda bench: bench.driver.report(DriverEvent(EventKind.ECC_DOUBLE, None)),
    "passing": lambda bench: bench.driver.outcomes.clear(),
    "hung": lambda bench: setattr(bench.driver, "hung", True),
    "answering": lambda bench: setattr(bench.driver, "hung", False),
    "failing": lambda bench: setattr(bench.driver, "failure", DriverError("it is gone")),
    "working": lambda bench: setattr(bench.driver, "failure", None),
    "breaks": lambda bench: bench.driver.break_events(),
    "ends": lambda bench: bench.driver.end_events(),
    "renewable": lambda bench: setattr(bench.driver, "renewable", True),
    "mended-by-renewal": lambda bench: setattr(bench.driver, "mended_by_renewal", True),
    "lists-all": lambda bench: scanned(bench, Scan("560.1", GPUS)),
    "lists-01": lambda bench: scanned(bench, Scan("560.1", GPUS[:2])),
    "lists-01-and-a-fault": lambda bench: scanned(bench, Scan("560.1", GPUS[:2], (FAULT,))),
    "finds-1-lost": lambda bench: bench.keeper.found(Scan("570.1", GPUS[::2], (LOST,))),
}


def scanned(bench: HealthBench, scan: Scan) -> None:
    bench.keeper.found(scan)
    bench.watch.scanned(scan)


async def do(bench: HealthBench, word: str) -> None:
    """`+5`: 5 s pass; `xid48@1`, `xid48@?`; `1=lost`, `all=failed`: how probes end from now on.

    `release-1`, `recheck-1`, `was-reset-1`: what an operator does.
    """
    if word in DEEDS:
        DEEDS[word](bench)
    elif word.startswith("+"):
        await asyncio.sleep(float(word))
    elif match := re.fullmatch(r"xid(\d+)@([0-2?])", word):
        bench.driver.xid(None if match[2] == "?" else ALL[int(match[2])], int(match[1]))
    elif word.startswith("counts="):
        for uuid, count in zip(ALL, word.removeprefix("counts=").split(","), strict=True):
            bench.driver.signs[uuid] = GpuSigns(ecc_uncorrected=int(count))
    elif word.startswith("release-"):
        await bench.watch.release(word.removeprefix("release-"))
    elif match := re.fullmatch(r"(recheck|was-reset)-(\w+)", word):
        await bench.watch.recheck(match[2], was_reset=match[1] == "was-reset")
    elif word.startswith("opens-in="):
        bench.driver.opening = float(word.removeprefix("opens-in="))
    else:
        who, _, what = word.partition("=")
        for uuid in ALL if who == "all" else (ALL[int(who)],):
            if what == "deaf":
                bench.driver.unmonitored[uuid] = "not supported"
            else:
                bench.driver.outcomes[uuid] = ProbeOutcome(what)


def told(bench: HealthBench) -> str:
    """Each GPU in short, and how often things were done."""
    words, texts = [], []
    for uuid in ALL:
        health: Health = bench.watch._of(uuid)
        words.append(health.condition.value + "" * health.serving + "-out" * (not health.serving))
        words[-1] += "-needs-reset" * health.needs_reset
        if health.text and health.text not in texts:
            texts.append(health.text)
    driver = bench.driver
    counts = {
        "probes": len(driver.probes),
        "lists": bench.slices.value.generation,
        "verdicts": len(bench.verdicts),
        "scans wanted": bench.scans_wanted,
        "streams": driver.streams,
        "renewals": driver.renewals,
    }
    xids = [f"{'/'.join(labels)[-11:]}:{count}" for labels, count in bench.watch.xid_events.items()]
    lines = [" ".join(words), ", ".join(f"{name} {count}" for name, count in counts.items())]
    return " | ".join([*lines, *xids, *texts])


SCENARIOS = dict(
    line.split(" => ")
    for line in Path(__file__).with_name("scenarios.txt").read_text().splitlines()
    if " => " in line and not line.startswith("#")
)
"""By scenario: what is told after it."""


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_scenario_ends_as_it_is_told(scenario):
    async with running() as bench:
        for word in scenario.split():
            await do(bench, word)
        assert SCENARIOS[scenario] == told(bench)


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.startswith("+20 all=failed")])
async def test_no_gpu_is_bad_at_any_moment_of_a_hiccup(scenario):
    async with running() as bench:
        for word in scenario.split():
            await do(bench, word)
        assert "bad" not in {h.condition for verdict in bench.verdicts for h in verdict.values()}


XID = DriverEvent(EventKind.XID, G1, 48)


async def test_a_critical_xid_is_judged_within_milliseconds():
    async with running() as bench:
        before = asyncio.get_running_loop().time()
        bench.driver.xid(G1, 79)
        await bench.inventory.until(lambda inventory: inventory.generation == 2)

        assert asyncio.get_running_loop().time() <= before + 0.005001
        assert ["ok", "bad", "ok"] == bench.conditions
        assert 79 == bench.memory[G1].xid


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


async def test_a_first_stream_that_never_opens_is_noticed():
    bench = HealthBench()
    bench.driver.opening = 3600.0
    async with at_work(bench.watch.run):
        await asyncio.sleep(OPENING - 0.2)
        assert ["ok"] * 3 == bench.conditions
        await asyncio.sleep(10)

    assert ["unmonitored"] * 3 == bench.conditions
    assert "does not open" in bench.of(G0).text
