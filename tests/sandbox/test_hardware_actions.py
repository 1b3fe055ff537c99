"""What happens to simulated GPUs, and what the driver then says of them."""

import asyncio

import pytest

from agent.model import DriverEvent, EventKind, ProbeOutcome
from agent.sandbox.hardware import (
    RESET_TIME,
    HardwareError,
    SimulatedHardware,
    UnknownGpuError,
    described,
)

CHANGED = DriverEvent(EventKind.CHANGED)


@pytest.fixture
def hardware() -> SimulatedHardware:
    return SimulatedHardware(described("h100:4"))


def outcome(hardware: SimulatedHardware, name: str) -> ProbeOutcome:
    return hardware.probe(hardware.find(name).gpu.uuid).outcome


def test_a_gpu_is_named_by_index_or_uuid(hardware):
    uuid = hardware.states[2].gpu.uuid

    assert hardware.find("2") is hardware.find(uuid)


def test_the_use_of_a_gpu_is_the_sum_over_its_processes(hardware):
    idle, busy = hardware.states[:2]
    for _ in range(3):
        hardware.use("1", 500, 40)

    samples = [hardware.sample(state.gpu.uuid) for state in (idle, busy)]
    assert [(0, 0), (100, 1500)] == [(one.gpu_percent, one.used_mib) for one in samples]


@pytest.mark.parametrize("action", ["lose", "restore", "remove"])
async def test_an_unknown_gpu_is_refused_with_the_known_ones(hardware, action):
    with pytest.raises(UnknownGpuError, match=r"no GPU `9`; the GPUs are: 0 \(GPU-.*3 \(GPU-"):
        getattr(hardware, action)("9")


@pytest.mark.parametrize("number", [13, 31, 43, 45, 68, 32])
async def test_an_xid_of_an_application_is_reported_and_harms_nothing(hardware, number):
    events = hardware.subscribe()
    state = hardware.xid("1", number)

    assert ("ok", (number,)) == (state.words, state.xids)
    assert (DriverEvent(EventKind.XID, state.gpu.uuid, number),) == await events.next()
    assert ProbeOutcome.PASSED is outcome(hardware, "1")


@pytest.mark.parametrize("number", [48, 95, 119])
async def test_a_gpu_that_needs_a_reset_answers_and_is_away_while_it_is_reset(hardware, number):
    assert "needs reset" == hardware.xid("0", number).words
    assert ProbeOutcome.PASSED is outcome(hardware, "0")
    events = hardware.subscribe()

    hardware.restore("0")
    assert ProbeOutcome.LOST is outcome(hardware, "0")
    await asyncio.sleep(RESET_TIME + 0.01)
    assert (ProbeOutcome.PASSED, "ok") == (outcome(hardware, "0"), hardware.find("0").words)
    assert (CHANGED, CHANGED) == await events.next()


async def test_a_refused_gpu_is_back_at_once_and_was_never_away(hardware):
    hardware.refuse("0")
    assert (ProbeOutcome.REFUSED, "needs reset") == (
        outcome(hardware, "0"),
        hardware.find("0").words,
    )
    events = hardware.subscribe()

    assert "ok" == hardware.restore("0").words
    assert (ProbeOutcome.PASSED, ()) == (outcome(hardware, "0"), hardware.scan().faults)
    assert (CHANGED,) == await events.next()


async def test_a_refused_gpu_that_is_lost_comes_back_with_its_reset(hardware):
    hardware.refuse("0")
    hardware.lose("0")

    assert "ok" == hardware.restore("0").words
    assert ProbeOutcome.PASSED is outcome(hardware, "0")


async def test_a_gpu_that_is_unplugged_during_its_reset_stays_away(hardware):
    hardware.xid("0", 48)
    hardware.restore("0")
    hardware.remove("0")
    await asyncio.sleep(RESET_TIME + 0.01)

    assert [1, 2, 3] == [state.gpu.index for state in hardware.states]


async def test_a_gpu_can_be_lost_without_a_word(hardware):
    events = hardware.subscribe()
    hardware.lose("3")
    hardware.xid("0", 31)

    assert ProbeOutcome.LOST is outcome(hardware, "3")
    assert [31] == [event.xid for event in await events.next()]


async def test_a_removed_gpu_leaves_its_place_to_an_added_one_that_is_another(hardware):
    gone = hardware.remove("1").gpu
    added = hardware.add().gpu

    assert (1, "NVIDIA H100 80GB HBM3") == (added.index, added.name)
    assert added.uuid != gone.uuid
    assert added.pci not in [s.gpu.pci for s in hardware.states if s.gpu.index != 1]
    assert "Tesla T4" == hardware.add("t4").gpu.name
    assert 5 == len(hardware.scan().gpus)


async def test_links_to_a_removed_gpu_are_gone(hardware):
    gone = hardware.remove("1").gpu.uuid

    assert gone not in [link.peer for gpu in hardware.scan().gpus for link in gpu.links]


async def test_a_full_node_and_an_unknown_profile_are_refused(hardware):
    with pytest.raises(HardwareError, match="no profile `x`"):
        hardware.add("x")
    for _ in range(60):
        hardware.add()
    with pytest.raises(HardwareError, match="this node is full"):
        hardware.add()


async def test_the_first_gpu_of_an_empty_node_is_an_h100():
    assert "NVIDIA H100 80GB HBM3" == SimulatedHardware(described("t4:0")).add().gpu.name


async def test_every_subscriber_sees_every_event_from_its_own_beginning(hardware):
    early = hardware.subscribe()
    hardware.xid("0", 31)
    late = hardware.subscribe()
    hardware.xid("0", 43)

    assert [31, 43] == [event.xid for event in await early.next()]
    assert [43] == [event.xid for event in await late.next()]


async def test_a_hung_driver_reports_later_and_a_shorter_hang_does_not_end_a_longer(hardware):
    loop = asyncio.get_running_loop()
    events, start = hardware.subscribe(), loop.time()
    hardware.hang(30)
    hardware.hang(5)
    hardware.xid("0", 31)
    await events.next()

    assert 30 == pytest.approx(loop.time() - start, abs=0.01)
    assert 0 == hardware.hanging
