"""What happens to simulated GPUs, and what the driver then says of them."""

import pytest

from agent.model import DriverEvent, EventKind, ProbeOutcome
from agent.sandbox.hardware import HardwareError, SimulatedHardware, described

CHANGED = DriverEvent(EventKind.CHANGED)


@pytest.fixture
def hardware() -> SimulatedHardware:
    return SimulatedHardware(described("h100:4"))


def outcome(hardware: SimulatedHardware, name: str) -> ProbeOutcome:
    return hardware.probe(hardware.find(name).gpu.uuid).outcome


@pytest.mark.parametrize("action", ["lose", "restore", "remove"])
async def test_an_unknown_gpu_is_refused_with_the_known_ones(hardware, action):
    with pytest.raises(HardwareError, match=r"no GPU `9`; the GPUs are: 0 \(GPU-.*3 \(GPU-"):
        getattr(hardware, action)("9")


@pytest.mark.parametrize("number", [13, 31, 43, 45, 68, 32])
async def test_an_xid_of_an_application_is_reported_and_harms_nothing(hardware, number):
    events = hardware.subscribe()
    state = hardware.xid("1", number)

    assert ("ok", (number,)) == (state.words, state.xids)
    assert DriverEvent(EventKind.XID, state.gpu.uuid, number) == events.get_nowait()
    assert ProbeOutcome.PASSED is outcome(hardware, "1")


@pytest.mark.parametrize("number", [48, 95, 119])
async def test_a_gpu_that_needs_a_reset_answers_and_is_well_after_it(hardware, number):
    assert "needs reset" == hardware.xid("0", number).words
    assert ProbeOutcome.PASSED is outcome(hardware, "0")
    events = hardware.subscribe()

    hardware.restore("0")
    assert (ProbeOutcome.PASSED, "ok") == (outcome(hardware, "0"), hardware.find("0").words)
    assert CHANGED == events.get_nowait()


async def test_a_removed_gpu_leaves_its_place_to_an_added_one_that_is_another(hardware):
    gone = hardware.remove("1").gpu
    added = hardware.add().gpu

    assert (1, "NVIDIA H100 80GB HBM3") == (added.index, added.name)
    assert added.uuid != gone.uuid
    assert added.pci not in [s.gpu.pci for s in hardware.states if s.gpu.index != 1]
    assert "Tesla T4" == hardware.add("t4").gpu.name
    assert 5 == len(hardware.scan().gpus)
