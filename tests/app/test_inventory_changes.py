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
    ProbeOutcome,
    Trouble,
    slice_id,
)
from agent.sandbox.hardware import Description, SimulatedHardware
from tests.app.front_node import BEFORE, SETTINGS, FrontNode, joined, running
from tests.builders import a_gpu, a_health, a_row, a_share, a_uuid
from tests.fakes.driver import HardwareDriver, ScriptedDriver
from tests.services.at_work import at_work

G0, G1, G2 = (a_uuid(number) for number in range(3))
CHANGED = DriverEvent(EventKind.CHANGED)
AT_ONCE = 0.1
SCANNED = 61.0
"""A look every minute finds what nobody reports."""

ROW = a_row(shares=(a_share(uuid=G1),), slice_ids=(slice_id(G1, 12),))
HOLDING = msgspec.structs.replace(BEFORE, ledger=Ledger((ROW,)))
"""A pod has a slice of GPU 1 whose number is beyond the split count."""


def gpus(count: int) -> list[Gpu]:
    return [a_gpu(index=number) for number in range(count)]


async def pod_ends(node: FrontNode) -> None:
    await node.front.state.commit(lambda ledger: ledger.drop([ROW.key]))
    await asyncio.sleep(AT_ONCE)


@pytest.mark.parametrize(
    ("act", "within"),
    [
        (lambda driver: driver.report(CHANGED), AT_ONCE),
        (lambda driver: driver.break_events(), AT_ONCE),
        (lambda _: None, SCANNED),
    ],
    ids=["reported", "the driver was loaded anew", "unreported"],
)
async def test_gpus_that_come_and_go_are_listed_registered_and_told(act, within):
    driver = ScriptedDriver(gpus(2))
    async with running(joined(driver)) as node:
        driver.gpus = gpus(3)[1:]
        act(driver)
        await asyncio.sleep(within)

        assert [G1, G2] == list(node.groups) == list(node.registered)
        assert [G1, G2] == node.served
        assert (2, True) == node.registered[G2]
        await asyncio.sleep(60)
        changes = [event.text for event in node.told if event.reason == "GpuInventoryChanged"]
        assert [f"no longer shared: GPU 0 ({G0}); shared now: GPU 2 ({G2})"] == changes


async def test_a_gpu_that_answers_as_lost_is_looked_for_at_once_and_leaves_if_it_is_gone():
    driver = ScriptedDriver(gpus(2))
    async with running(joined(driver)) as node:
        driver.gpus.pop()
        driver.outcomes[G1] = ProbeOutcome.LOST
        await asyncio.sleep(10 + AT_ONCE)  # the next probes

        assert [G0] == list(node.groups) == list(node.registered)
        assert f"no longer shared: GPU 1 ({G1})" == node.told[-1].text


@pytest.mark.parametrize(
    ("outcome", "reasons"),
    [
        (None, ["GpuInventoryChanged", "GpuDegradedForPod"]),
        (ProbeOutcome.LOST, ["GpuInventoryChanged", "GpuDegradedForPod", "GpuUnhealthy"]),
    ],
)
async def test_an_unplugged_gpu_stays_listed_as_unhealthy_until_its_last_pod_ends(outcome, reasons):
    driver = ScriptedDriver(gpus(2))
    async with running(joined(driver, HOLDING)) as node:
        driver.gpus.pop()
        driver.outcomes |= {G1: outcome} if outcome else {}
        driver.report(CHANGED)
        await asyncio.sleep(AT_ONCE)

        assert not node.groups[G1].healthy
        assert slice_id(G1, 12) in node.groups[G1].ids
        assert (1, False) == node.registered[G1]
        await asyncio.sleep(300)
        assert reasons == node.reasons
        await pod_ends(node)
        assert [G0] == list(node.groups) == list(node.registered)


async def test_a_driver_that_is_unloaded_takes_no_gpu_along_and_serves_all_when_it_is_back():
    driver = ScriptedDriver(gpus(2))
    async with running(joined(driver, HOLDING)) as node:
        driver.failure = DriverError("the driver is not loaded")
        driver.break_events()
        await asyncio.sleep(300)
        assert "not loaded" in (node.front.discovery.problem.value or "")
        assert ([G0, G1], []) == (list(node.groups), node.served)
        assert {G0: (0, False), G1: (1, False)} == node.registered

        driver.failure = None
        await asyncio.sleep(40)
        assert ([G0, G1], None) == (node.served, node.front.discovery.problem.value)
        assert {G0: (0, True), G1: (1, True)} == node.registered
        assert ROW == node.front.state.ledger.value.rows[0]
        await asyncio.sleep(30)
        assert ["GpuDriverUnresponsive", "GpuUnhealthy", "GpuDegradedForPod", "GpuRecovered"] == (
            node.reasons
        )


async def test_a_library_that_appears_after_minutes_is_used_and_nothing_is_listed_before():
    driver = ScriptedDriver(gpus(2))
    driver.failure = DriverMissing("libnvidia-ml.so.1 cannot be loaded")
    async with running(joined(driver, HOLDING)) as node:
        await asyncio.sleep(420)
        assert 0 == node.front.facts.slices.value.generation
        assert {} == node.registered
        assert "cannot be loaded" in (node.front.discovery.problem.value or "")

        driver.failure = None
        await asyncio.sleep(30)
        assert [G0, G1] == node.served == list(node.registered)
        assert slice_id(G1, 12) in node.groups[G1].ids


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


async def test_a_gpu_that_an_admin_switches_to_mig_mode_leaves_and_its_pods_keep_it():
    driver = ScriptedDriver(gpus(2))
    async with running(joined(driver, HOLDING)) as node:
        driver.gpus[1] = a_gpu(index=1, mig_enabled=True)
        driver.report(CHANGED)
        await asyncio.sleep(AT_ONCE)

        assert [G0] == node.served
        assert slice_id(G1, 12) in node.groups[G1].ids
        assert (1, False) == node.registered[G1]
        assert (False, True) == (node.shared(G1).present, node.shared(G1).there)
        assert ["GpuDegradedForPod", "GpuLeftOut"] == sorted(node.reasons)
        assert any("MIG mode" in one.text for one in node.told if one.reason == "GpuLeftOut")

        await pod_ends(node)
        assert [G0] == list(node.groups) == list(node.registered)
        driver.gpus = gpus(2)
        driver.report(CHANGED)
        await asyncio.sleep(AT_ONCE)

        assert [G0, G1] == node.served == list(node.registered)
        assert "GpuInventoryChanged" == node.reasons[-1]


async def test_a_gpu_that_a_scan_finds_lost_is_one_event():
    driver = ScriptedDriver(gpus(2))
    async with running(joined(driver)) as node:
        driver.gpus.pop()
        driver.faults = [GpuFault(G1, "GPU is lost", Trouble.LOST)]
        driver.outcomes[G1] = ProbeOutcome.LOST
        await asyncio.sleep(SCANNED + 60)

        assert [G0] == node.served
        assert ["GpuUnhealthy"] == node.reasons
        lost = (
            f"GPU 1 ({G1}): the driver no longer reaches it (as scripted); if this lasts, reboot "
        )
        assert f"{lost}the node [H-LOST]" == node.told[-1].text


LEFT_OUT = "is not shared: Unknown Error; if this lasts, reset it or reboot the node [GpuLeftOut]"


async def test_a_gpu_that_cannot_be_described_is_left_out_with_one_event():
    driver = ScriptedDriver(gpus(1))
    driver.faults = [GpuFault("index 1", "Unknown Error")]
    async with running(joined(driver)) as node:
        await asyncio.sleep(5 * SCANNED)
        assert ([G0], [f"GPU index 1 {LEFT_OUT}"]) == (node.served, [one.text for one in node.told])
        driver.faults.append(GpuFault("index 2", "Unknown Error"))
        await asyncio.sleep(SCANNED)

        assert [f"GPU index 2 {LEFT_OUT}"] == [one.text for one in node.told[1:]]


async def test_a_gpu_that_is_lost_while_its_health_is_switched_off_is_left_out():
    driver = ScriptedDriver(gpus(2))
    settings = SETTINGS.replace("driverHang: 60", "disabledXids: all")
    async with running(joined(driver, settings=settings)) as node:
        driver.gpus.pop()
        driver.faults = [GpuFault(G1, "GPU is lost", Trouble.LOST)]
        await asyncio.sleep(SCANNED)

        assert ["GpuLeftOut"] == node.reasons


async def test_an_xid_a_loss_a_return_and_the_end_of_the_cool_down_are_four_events():
    hardware = SimulatedHardware(Description("570.86.15", tuple(gpus(2))))
    async with running(joined(HardwareDriver(hardware))) as node:
        hardware.xid("1", 48)
        await asyncio.sleep(100)
        hardware.restore("1")
        await asyncio.sleep(0.5)
        assert (Condition.LOST, False) == (
            node.shared(G1).health.condition,
            node.shared(G1).present,
        )
        await asyncio.sleep(500)
        # A reset was enough for the XID, a GPU that is lost needs a reboot, and one that is back
        # needs nothing: who reads Events alone would else reboot the node during the cool-down.
        ill = ["GpuUnhealthy"] * 3
        assert (ill, [G0]) == (node.reasons, node.served)
        back = "it was lost and is back; it is served again after its cool-down"
        assert f"GPU 1 ({G1}): {back} [H-048]" == node.told[-1].text
        await asyncio.sleep(200)

        assert ([*ill, "GpuRecovered"], [G0, G1]) == (node.reasons, node.served)


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


# The list of a GPU that fell ill is made with the verdict: it waits for no follower's turn.


async def test_a_verdict_makes_the_list_although_nobody_follows_the_inventory():
    driver = ScriptedDriver([a_gpu(index=number) for number in range(2)])
    front = joined(driver)
    async with at_work(front.discovery.run, front.health.run):
        await asyncio.sleep(0.1)
        assert [True, True] == [one.healthy for one in front.facts.slices.value.groups]

        driver.xid(a_uuid(1), 48)
        await asyncio.sleep(0.1)

        assert [True, False] == [one.healthy for one in front.facts.slices.value.groups]
