"""GPUs come, go, change places and modes, and their driver with them; who has one keeps it."""

import asyncio

import msgspec
import pytest

from agent.errors import DriverError, DriverMissing
from agent.ledger import Ledger
from agent.model import (
    Condition,
    DriverEvent,
    EventKind,
    Gpu,
    GpuFault,
    GpuSigns,
    GpuUuid,
    Probe,
    ProbeOutcome,
    RecoveryAction,
    Trouble,
    slice_id,
)
from agent.sandbox.hardware import SimulatedHardware
from agent.status import gpus_of
from tests.app.front_node import BEFORE, SETTINGS, FrontNode, joined, running, watched
from tests.builders import a_gpu, a_health, a_row, a_share, a_uuid
from tests.fakes.driver import HardwareDriver, ScriptedDriver
from tests.services.at_work import at_work

G0, G1, G2 = (a_uuid(number) for number in range(3))
NAMES = {a_uuid(number): number for number in range(3)}
CHANGED = DriverEvent(EventKind.CHANGED)
AT_ONCE = 0.1

ROW = a_row(shares=(a_share(uuid=G1),), slice_ids=(slice_id(G1, 12),))
HOLDING = msgspec.structs.replace(BEFORE, ledger=Ledger((ROW,)))
"""A pod has a slice of GPU 1 whose number is beyond the split count."""


def gpus(count: int) -> list[Gpu]:
    return [a_gpu(index=number) for number in range(count)]


DEEDS = {
    "reported": lambda driver: driver.report(CHANGED),
    "loaded-anew": lambda driver: driver.break_events(),
    "unloaded": lambda driver: setattr(driver, "failure", DriverError("it is not loaded")),
    "there": lambda driver: setattr(driver, "failure", None),
    "1-answers-as-lost": lambda driver: driver.outcomes.update({G1: ProbeOutcome.LOST}),
    "1-is-found-lost": lambda driver: driver.faults.append(GpuFault(G1, "lost", Trouble.LOST)),
    "?1-fails": lambda driver: driver.faults.append(GpuFault("index 1", "Unknown Error")),
    "?2-fails": lambda driver: driver.faults.append(GpuFault("index 2", "Unknown Error")),
}


async def do(node: FrontNode, driver: ScriptedDriver, word: str) -> None:
    """`+5`: 5 s pass; `gpus=02m`: the driver lists GPU 0, and GPU 2 in MIG mode."""
    if word in DEEDS:
        DEEDS[word](driver)
    elif word.startswith("gpus="):
        listed = word.removeprefix("gpus=").replace("m", "")
        driver.gpus = [a_gpu(index=int(n), mig_enabled=f"{n}m" in word) for n in listed]
    elif word == "pod-ends":
        await node.front.state.commit(lambda ledger: ledger.drop([ROW.key]))
    else:
        await asyncio.sleep(float(word))


def shown(node: FrontNode) -> str:
    """`0+ 1-`: what the kubelet is told, GPU by GPU, and schedulers the same; all Events."""
    lists = [
        " ".join(f"{NAMES[uuid]}{'-+'[is_well]}" for uuid, is_well in told)
        for told in (
            [(uuid, group.healthy) for uuid, group in node.groups.items()],
            [(uuid, is_well) for uuid, (_, is_well) in node.registered.items()],
        )
    ]
    assert lists[0] == lists[1]
    return " | ".join([lists[0], *node.reasons])


SWAPPED = f"no longer shared: GPU 0 ({G0}); shared now: GPU 2 ({G2})"
ONE_GONE = f"no longer shared: GPU 1 ({G1})"
LOST = "reboot the node [H-LOST]"
LEFT_OUT = "is not shared: Unknown Error; if this lasts, reset it or reboot the node [GpuLeftOut]"
AWAY = "GpuInventoryChanged | GpuDegradedForPod"
SILENT = "GpuDriverUnresponsive | GpuUnhealthy | GpuDegradedForPod"
IN_MIG = "GpuLeftOut | GpuDegradedForPod"
DEAF = "GpuUnmonitored"

NOBODY_HOLDS = f"""
gpus=12 reported +0.1 => 1+ 2+ then +60 => 1+ 2+ | GpuInventoryChanged => {SWAPPED}
gpus=12 loaded-anew +0.1 => 1+ 2+ | GpuInventoryChanged | {DEAF}
gpus=12 +61 => 1+ 2+ then +60 => 1+ 2+ | GpuInventoryChanged => {SWAPPED}
gpus=0 1-answers-as-lost +10.1 => 0+ | GpuInventoryChanged => {ONE_GONE}
gpus=0 1-is-found-lost 1-answers-as-lost +121 => 0+ 1- | GpuUnhealthy => {LOST}
?1-fails +305 => 0+ 1+ | GpuLeftOut => GPU index 1 {LEFT_OUT}
?1-fails ?2-fails +61 => 0+ 1+ | GpuLeftOut | GpuLeftOut => GPU index 2 {LEFT_OUT}
?1-fails +61 ?2-fails +305 => 0+ 1+ | GpuLeftOut | GpuLeftOut => GPU index 2 {LEFT_OUT}
"""
"""A look every minute finds what nobody reports; one that answers as lost is looked for at once,
and leaves if it is gone; one that a scan finds lost, or cannot describe, is one Event."""

A_POD_HOLDS_1 = f"""
gpus=0 reported +0.1 => 0+ 1- then +300 => 0+ 1- | {AWAY} then pod-ends +0.1 => 0+ | {AWAY}
gpus=0 1-answers-as-lost reported +300 => 0+ 1- | {AWAY} | GpuUnhealthy then pod-ends +0.1 => 0+
unloaded loaded-anew +300 => 0- 1- | {SILENT} then there +40 => 0+ 1+ then +30 => | GpuRecovered
gpus=01m reported +0.1 => 0+ 1- | {IN_MIG} then pod-ends gpus=01 reported +0.1 => 0+ 1+
"""
"""One that is unplugged stays listed as unhealthy until its last pod ends, as one in MIG mode does;
a driver that is unloaded takes none along, and serves all when it is back."""


@pytest.mark.parametrize(
    ("state", "steps"),
    [(BEFORE, one) for one in NOBODY_HOLDS.strip().splitlines()]
    + [(HOLDING, one) for one in A_POD_HOLDS_1.strip().splitlines()],
)
async def test_what_becomes_of_gpus_and_what_is_told(state, steps):
    driver = ScriptedDriver(gpus(2))
    is_held = state is HOLDING
    async with running(joined(driver, state)) as node:
        for step in steps.split(" then "):
            words, expected, *said = step.split(" => ")
            for word in words.split():
                await do(node, driver, word)
            is_held = is_held and "pod-ends" not in words
            ids = node.groups[G1].ids if G1 in node.groups else ()
            assert is_held == (slice_id(G1, 12) in ids), step
            found = shown(node)
            assert found.endswith(expected) if " | " in expected else expected in found, step
            assert all(text in node.told[-1].text for text in said), step


async def test_a_library_that_appears_after_minutes_is_used_and_nothing_is_listed_before():
    driver = ScriptedDriver(gpus(2))
    driver.failure = DriverMissing("libnvidia-ml.so.1 cannot be loaded")
    async with running(joined(driver, HOLDING)) as node:
        await asyncio.sleep(420)
        assert 0 == node.front.facts.slices.value.generation
        assert "cannot be loaded" in (node.front.discovery.problem.value or "")

        driver.failure = None
        await asyncio.sleep(30)
        assert shown(node).startswith("0+ 1+ | ")
        assert slice_id(G1, 12) in node.groups[G1].ids


async def test_gpus_that_wake_one_by_one_are_served_and_no_reset_is_asked_for():
    driver = ScriptedDriver()
    driver.faults = [GpuFault(f"index {n}", "no answer in time", Trouble.SILENT) for n in range(3)]
    async with running(joined(driver)) as node:
        waking = {one.name: one.text for one in watched(node.front).checks() if not one.ok}
        assert waking["inventory"].startswith("the driver answers; GPU index 0, GPU index 1, ")
        assert 1 == waking["gpus_answering"].count("it initialises for seconds")
        for number in range(3):
            driver.gpus.append(a_gpu(index=number))
            driver.faults.pop(0)
            driver.report(CHANGED)  # its call came back
            await asyncio.sleep(AT_ONCE)
            assert gpus(number + 1) == [node.shared(uuid).gpu for uuid in node.served]

        assert all(one.ok for one in watched(node.front).checks() if one.name == "gpus_answering")
        assert not any("reset" in event.text for event in node.told)


async def test_a_gpu_that_has_another_index_is_the_same_gpu():
    ill = a_health(condition=Condition.BAD, cause="xid", text="XID 48")
    before = msgspec.structs.replace(HOLDING, health={G1: ill})
    driver = ScriptedDriver([a_gpu(index=0, uuid=G1), a_gpu(index=1, uuid=G0)])
    async with running(joined(driver, before)) as node:
        assert {G1: (0, False), G0: (1, True)} == node.registered
        assert [G0] == node.served
        assert slice_id(G1, 12) in node.groups[G1].ids

        driver.gpus = gpus(2)
        driver.report(CHANGED)
        await asyncio.sleep(AT_ONCE)
        assert {G0: (0, True), G1: (1, False)} == node.registered
        assert ([], [G0]) == (node.reasons, node.served)


async def test_after_a_reboot_that_shuffled_the_indexes_each_pod_has_the_gpu_it_had():
    driver = ScriptedDriver([a_gpu(index=0, uuid=G1), a_gpu(index=1, uuid=G0)])
    async with running(joined(driver, HOLDING, boot="the next boot")) as node:
        assert {G1: (0, True), G0: (1, True)} == node.registered
        assert slice_id(G1, 12) in node.groups[G1].ids
        assert slice_id(G0, 12) not in node.groups[G0].ids


def cool_downs(node):
    """What `status` says of each GPU: seconds from the change of its health on."""
    found = gpus_of(watched(node.front).facts())
    return [
        one.cooled_at and one.since and (one.cooled_at - one.since).total_seconds() for one in found
    ]


async def test_an_xid_a_loss_a_return_and_the_end_of_the_cool_down_are_four_events():
    hardware = SimulatedHardware(gpus(2))
    async with running(joined(HardwareDriver(hardware))) as node:
        hardware.xid("1", 48)
        await asyncio.sleep(100)
        hardware.lose("1")
        await asyncio.sleep(100)
        assert (Condition.LOST, False) == (
            node.shared(G1).health.condition,
            node.shared(G1).present,
        )
        assert [None, None] == cool_downs(node), "a lost GPU may never be back"
        hardware.restore("1")
        await asyncio.sleep(500)
        # A reset was enough for the XID, a GPU that is lost needs a reboot, and one that is back
        # needs nothing: who reads Events alone would else reboot the node during the cool-down.
        ill = ["GpuUnhealthy"] * 3
        assert (ill, [G0]) == (node.reasons, node.served)
        back = "it was lost and is back; it is served again after its cool-down"
        assert f"GPU 1 ({G1}): {back} [H-048]" == node.told[-1].text
        assert [None, 600.0] == cool_downs(node)
        await asyncio.sleep(200)

        assert ([*ill, "GpuRecovered"], [G0, G1]) == (node.reasons, node.served)
        assert [None, None] == cool_downs(node)


class SlowDriver(ScriptedDriver):
    """Its probes take so long that each follower sees what was published before them."""

    async def probe(self, uuid: GpuUuid) -> Probe:
        await asyncio.sleep(AT_ONCE)
        return await super().probe(uuid)


RESET = GpuSigns(recovery=RecoveryAction.GPU_RESET)
ADVICE = "the driver asked for a reset (gpu-reset); reset it or reboot the node [H-ADVICE]"
GONE = "the driver no longer reaches it (as scripted); if this lasts, reboot the node [H-LOST]"
REFUSED = "the driver refused calls for it; reset it or reboot the node [H-RESET]"
REPEATED = ["GpuUnhealthy", "GpuReleased", "GpuUnhealthy"]


@pytest.mark.parametrize(
    ("how", "is_released", "reasons", "text"),
    [
        ("passed", True, ["GpuReleased", "GpuRecovered"], ""),
        ("lost", True, REPEATED, GONE),
        ("lost", False, REPEATED[:1], GONE),
        ("refused", True, REPEATED, REFUSED),
        ("refused", False, REPEATED[:1], REFUSED),
        ("advised", True, REPEATED, ADVICE),
        ("advised", False, REPEATED[:1], ADVICE),
    ],
)
async def test_a_recheck_tells_only_what_the_gpu_answers_and_since_when_it_was_so(
    how, is_released, reasons, text
):
    driver = SlowDriver(gpus(2))
    async with running(joined(driver)) as node:
        if how == "advised":
            driver.signs[G1] = RESET
        else:
            driver.outcomes[G1] = ProbeOutcome(how)
        await asyncio.sleep(20)
        before = node.shared(G1).health
        if is_released:
            await node.front.health.release("1")
            await asyncio.sleep(20)
        await node.front.health.recheck("1", was_reset=True)
        await asyncio.sleep(20)

        health = node.shared(G1).health
        assert (reasons, text) == (node.reasons, health.text)
        assert text in node.told[-1].text
        assert health.since == before.since or not text


async def test_one_gpu_whose_calls_hang_leaves_the_seven_others_served_and_sampled():
    driver = ScriptedDriver(gpus(8))
    others = [a_uuid(number) for number in range(8) if number != 3]
    async with running(joined(driver)) as node:
        driver.outcomes[a_uuid(3)] = ProbeOutcome.SILENT
        driver.gpus.pop(3)
        driver.faults = [GpuFault(a_uuid(3), "no answer in time")]
        driver.report(CHANGED)
        await asyncio.sleep(200)

        assert (8, others) == (len(node.groups), node.served)
        assert ["GpuDriverUnresponsive", "GpuUnhealthy"] == node.reasons
        samples = node.front.samples
        assert others == [a_uuid(n) for n in range(8) if samples.newest(a_uuid(n))]

        driver.outcomes.clear()
        driver.gpus, driver.faults = gpus(8), []
        await asyncio.sleep(20)
        assert (8, 8) == (len(node.served), sum(1 for uuid in node.groups if samples.newest(uuid)))


async def test_a_gpu_that_is_lost_while_its_health_is_switched_off_is_left_out():
    driver = ScriptedDriver(gpus(2))
    settings = SETTINGS.replace("driverHang: 60", "disabledXids: all")
    async with running(joined(driver, settings=settings)) as node:
        for word in ("gpus=0", "1-is-found-lost", "+61"):
            await do(node, driver, word)

        assert ["GpuLeftOut"] == node.reasons


# The list of a GPU that fell ill is made with the verdict: it waits for no follower's turn.


async def test_a_verdict_makes_the_list_although_nobody_follows_the_inventory():
    driver = ScriptedDriver([a_gpu(index=number) for number in range(2)])
    front = joined(driver)
    front.keeper.withhold("")
    async with at_work(front.discovery.run, front.health.run):
        await asyncio.sleep(0.1)
        assert [True, True] == [one.healthy for one in front.facts.slices.value.groups]

        driver.xid(a_uuid(1), 48)
        await asyncio.sleep(0.1)

        assert [True, False] == [one.healthy for one in front.facts.slices.value.groups]
