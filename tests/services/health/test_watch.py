"""What becomes of three GPUs, by what the driver reports and how their probes end."""

import asyncio
import re
from pathlib import Path

import pytest
import structlog

from agent.errors import DriverError
from agent.inventory import Discovery
from agent.model import (
    DriverEvent,
    EventKind,
    GpuFault,
    GpuSigns,
    GpuUuid,
    Health,
    ProbeOutcome,
    RecoveryAction,
    Scan,
    Trouble,
)
from tests.builders import a_gpu
from tests.fakes.driver import ScriptedDriver
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
    "lists-all": lambda bench: bench.scanned(Scan("560.1", GPUS)),
    "lists-01": lambda bench: bench.scanned(Scan("560.1", GPUS[:2])),
    "lists-01-and-a-fault": lambda bench: bench.scanned(Scan("560.1", GPUS[:2], (FAULT,))),
    "finds-1-lost": lambda bench: bench.scanned(Scan("570.1", GPUS[::2], (LOST,))),
}


async def do(bench: HealthBench, word: str) -> None:
    """`+5`: 5 s pass; `xid48@1`, `xid48@?`; `1=lost`, `all=failed`: how probes end from now on.

    `1=lost:gone`: with these words. `1=rows`: with a memory row that could not be remapped.

    `1=advised`: the driver says from now on that this GPU needs a reset.

    `release-1`, `recheck-1`, `was-reset-1`: what an operator does.
    """
    if word in DEEDS:
        DEEDS[word](bench)
    elif word.startswith("+"):
        await asyncio.sleep(float(word))
    elif match := re.fullmatch(r"xid(\d+)@([0-2?])", word):
        bench.driver.xid(None if match[2] == "?" else ALL[int(match[2])], int(match[1]))
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
            elif what == "advised":
                bench.driver.signs[uuid] = GpuSigns(recovery=RecoveryAction.GPU_RESET)
            elif what == "rows":
                bench.driver.signs[uuid] = GpuSigns(rows_failed=True)
            else:
                outcome, _, text = what.partition(":")
                bench.driver.outcomes[uuid] = ProbeOutcome(outcome)
                bench.driver.texts[uuid] = text or "as scripted"


def told(bench: HealthBench) -> str:
    """Each GPU in short, and how often things were done."""
    words, texts = [], []
    for uuid in ALL:
        health: Health = bench.watch._health_of(uuid)
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


XID = DriverEvent(EventKind.XID, G1, 48)


@pytest.mark.parametrize("grave", [XID, DriverEvent(EventKind.ECC_DOUBLE, G1)])
async def test_no_number_of_different_reports_pushes_a_grave_one_out(grave):
    async with running() as bench:
        for number in range(2048):
            bench.driver.xid(G0, 1000 + number)
        bench.driver.report(grave)
        await asyncio.sleep(0.1)

    counts = dict(bench.watch.xid_events.items())
    assert len(counts) <= 3, "a driver that invents numbers makes no series for each"
    assert 2048 <= sum(counts.values())
    assert bench.of(G1).needs_reset


# A driver that fails alike for all GPUs condemns none; another session is tried once.


def faults(*uuids, trouble=Trouble.FAILED) -> list[GpuFault]:
    return [GpuFault(uuid, "Unknown Error", trouble) for uuid in uuids]


async def looked_at(driver: ScriptedDriver, seconds: float, ill=()) -> tuple[Discovery, list[Scan]]:
    found: list[Scan] = []
    discovery = Discovery(driver, found.append, ill=lambda uuid: uuid in ill)
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
    ("trouble", "ill"),
    [*((t, ()) for t in (Trouble.SILENT, Trouble.DENIED, Trouble.RESET)), (Trouble.LOST, ALL)],
)
async def test_gpus_that_wake_must_be_reset_or_were_ill_before_are_no_fault_of_the_driver(
    trouble, ill
):
    driver = ScriptedDriver()
    driver.faults = faults(G0, G1, trouble=trouble)
    discovery, found = await looked_at(driver, 0.5, ill)

    assert (1, None, 0) == (len(found), discovery.problem.value, driver.renewals)


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


# Storms: few lists, few lines, right counts.


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


async def test_a_storm_of_one_gpu_is_one_list_and_one_line_and_every_xid_is_counted():
    with structlog.testing.capture_logs() as lines:
        async with running() as bench:
            before = bench.slices.value.generation
            await storm(bench, (G0, 48), seconds=3)

            assert before + 1 == bench.slices.value.generation
            assert (((G0, "48"), 3 * STORM),) == bench.watch.xid_events.items()
            assert (((G0, "ok", "bad"), 1),) == bench.watch.transitions.items()
            assert ["bad", "ok", "ok"] == bench.conditions
            assert len(bench.verdicts) <= 16
    assert [48] == [line["xid"] for line in lines if line["event"] == "gpu.xid"]


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
