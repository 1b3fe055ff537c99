"""A health watch over three GPUs, with an inventory and lists that follow it, on virtual time."""

import asyncio
import re
from contextlib import asynccontextmanager

import msgspec
import pytest
import structlog

from agent.errors import DriverError
from agent.health.judge import HealthSettings
from agent.health.watch import HealthWatch
from agent.inventory import Discovery, InventoryKeeper
from agent.kit.cell import Cell
from agent.model import (
    Condition,
    DriverEvent,
    EventKind,
    GpuFault,
    GpuSigns,
    GpuUuid,
    Health,
    Inventory,
    ProbeOutcome,
    RecoveryAction,
    Scan,
    SharingSettings,
    SliceList,
    Trouble,
)
from tests.builders import a_gpu, a_health, a_shared_gpu, a_uuid, an_inventory
from tests.fakes.clock import LoopClock
from tests.fakes.driver import ScriptedDriver
from tests.services.at_work import at_work, scenarios

G0, G1, G2 = (a_uuid(n) for n in range(3))


class HealthBench:
    """A health watch over three GPUs and an inventory that follows it."""

    def __init__(self, settings: HealthSettings | None = None, recalled=None, **kwargs) -> None:
        self.driver = kwargs.get("driver") or ScriptedDriver()
        self.inventory = Cell(Inventory())
        clock = LoopClock()
        self.slices = Cell(SliceList())
        self.keeper = InventoryKeeper(
            self.inventory, Cell(SharingSettings()), clock, slices=self.slices
        )
        self.verdicts: list[dict] = []
        self.memory: dict = {}
        self.scans_wanted = 0
        self.watch = HealthWatch(
            driver=self.driver,
            inventory=self.inventory,
            judged=self.judged,
            remember=self.remember,
            changed=self.changed,
            settings=settings or HealthSettings(),
            clock=clock,
            recalled=recalled or {},
            boot_changed=kwargs.get("boot_changed", False),
        )
        self.scanned(Scan("570.1", tuple(a_gpu(index=n) for n in range(3))))

    def scanned(self, scan: Scan) -> None:
        self.keeper.found(scan)
        self.watch.scanned(scan)

    def judged(self, health) -> None:
        self.verdicts.append(dict(health))
        self.keeper.judged(health)

    def remember(self, health) -> None:
        self.memory = dict(health)

    def changed(self) -> None:
        self.scans_wanted += 1

    def of(self, uuid) -> Health:
        shared = self.inventory.value.find(uuid)
        assert shared
        return shared.health

    @property
    def conditions(self) -> list[str]:
        return [gpu.health.condition.value for gpu in self.inventory.value.gpus]


@asynccontextmanager
async def running(*args, **kwargs):
    bench = HealthBench(*args, **kwargs)
    async with at_work(bench.watch.run):
        await asyncio.sleep(0.001)
        yield bench


# What becomes of three GPUs, by what the driver reports and how their probes end.


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


SCENARIOS = scenarios("health_scenarios.txt")


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


# Health: asked for by a person, switched off by the operator, remembered over a boot.


OFF = HealthSettings(disabled_xids="all")
ILL = msgspec.structs.replace(
    a_health(condition=Condition.BAD, cause="xid", xid=48, text="XID 48"), needs_reset=True
)


async def test_a_recheck_says_what_the_gpu_was_and_is_and_why_a_well_one_takes_no_pods():
    async with running() as bench:
        await asyncio.sleep(1)
        bench.driver.outcomes[G1] = ProbeOutcome.LOST
        found = await bench.watch.recheck(G1)
        assert ("ok", "lost") == (found.before.condition, found.after.condition)
        bench.keeper.withhold("the disk is full")
        found = await bench.watch.recheck("0")
        assert not found.serving
        assert ("no slice is on offer: the disk is full",) == found.missing

        kept_out = a_shared_gpu(present=False, wanted=False)
        bench.inventory.set(an_inventory(gpus=(kept_out,)))
        found = await bench.watch.recheck("0")
        assert ("ok", False) == (found.after.condition.value, found.serving)
        assert ("it is filtered out by the settings",) == found.missing


async def test_what_is_reported_during_a_recheck_counts_once():
    async with running() as bench:
        await asyncio.sleep(1)
        bench.driver.hung = True
        async with asyncio.TaskGroup() as group:
            recheck = group.create_task(bench.watch.recheck("1"))
            await asyncio.sleep(0.1)
            bench.driver.xid(G1, 48)
            await asyncio.sleep(0.1)
            bench.driver.hung = False

    assert "bad" == recheck.result().after.condition
    assert (((G1, "ok", "bad"), 1),) == bench.watch.transitions.items()


async def test_a_gpu_that_is_taken_back_is_judged_by_the_settings():
    async with running(HealthSettings(enabled_xids="31")) as bench:
        bench.driver.xid(G1, 31)
        await asyncio.sleep(1)
        await bench.watch.release("1")
        found = await bench.watch.recheck("1")

    assert ("bad", False) == (found.after.condition, found.serving)


async def test_gpus_whose_health_nobody_wants_to_know_are_served_and_shown_as_such():
    async with running(OFF, recalled={G0: ILL}) as bench:
        bench.driver.xid(G1, 79)
        bench.driver.outcomes[G1] = ProbeOutcome.LOST
        await asyncio.sleep(3600)

        assert ["unmonitored"] * 3 == bench.conditions
        assert all(bench.of(gpu.uuid).serving for gpu in bench.inventory.value.gpus)
        assert "switched off" in bench.of(G0).text
        bench.scanned(Scan("570.1", (a_gpu(index=0), a_gpu(index=5))))
        await asyncio.sleep(1)
        assert ["unmonitored"] * 2 == bench.conditions
        assert "off" == (await bench.watch.recheck("5")).after.cause
        assert ([], {}) == (bench.driver.probes[1:], bench.memory)
        bench.driver.failure = DriverError("it is gone")
        assert "it is gone" == (await bench.watch.release("5")).obstacle
        bench.driver.failure = None
        assert not bench.of(a_uuid(5)).serving
        await bench.watch.recheck("5")
        assert (True, "off") == (bench.of(a_uuid(5)).serving, bench.of(a_uuid(5)).cause)


async def test_what_a_boot_has_mended_is_remembered_as_mended():
    bench = HealthBench(recalled={G0: ILL}, boot_changed=True)

    assert Condition.OK is bench.memory[G0].condition
    assert {} == HealthBench(recalled={G0: ILL}).memory


@pytest.mark.parametrize("away", [2.0, 18.0, 200.0])
@pytest.mark.parametrize("opening", [0.0, 0.3, 0.9])
async def test_all_gpus_that_are_taken_back_are_served_once_their_xids_are_heard(away, opening):
    async with running() as bench:
        await asyncio.sleep(1)
        bench.driver.opening = opening
        await bench.watch.release("all")
        bench.driver.failure = DriverError("all GPUs are released")
        bench.driver.break_events()
        await asyncio.sleep(away)
        deaf, publish = [], bench.watch._on_judged

        def judged(health):
            # Whether no stream was open when a GPU was said to be served again.
            deaf.extend(not bench.driver.listening for one in health.values() if one.serving)
            publish(health)

        bench.watch._on_judged = judged
        bench.driver.failure = None
        bench.driver.released.clear()

        found = await bench.watch.recheck("0")

        assert found
        assert (True, "ok", ()) == (found.serving, found.after.condition.value, found.missing)
        bench.driver.xid(G0, 48)
        await asyncio.sleep(0.5)
        assert not bench.of(G0).serving
        for name in ("1", "2"):
            await bench.watch.recheck(name)
        await asyncio.sleep(0.5)
        assert ["bad", "ok", "ok"] == bench.conditions
        assert {False} == set(deaf)
