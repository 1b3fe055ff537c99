"""The device files of the driver: missing, forbidden, denied, and too few."""

import pytest

from agent.node.devices import DeviceNode, NodeAccess, judge_access

CONTROL = DeviceNode("/dev/nvidiactl", NodeAccess.OPEN)
MEMORY = DeviceNode("/dev/nvidia-uvm", NodeAccess.OPEN)
GPUS = [DeviceNode(f"/dev/nvidia{number}", NodeAccess.SEEN) for number in range(2)]


def judged(*nodes: DeviceNode, gpus: int | None = 2) -> list[tuple[str, str]]:
    found = list(judge_access(nodes, gpus))
    assert all(one.advice for one in found if one.verdict.value != "ok")
    return [(one.subject, one.verdict.value) for one in found]


def test_all_files_that_can_be_opened_are_one_line():
    both = "/dev/nvidiactl, /dev/nvidia-uvm"

    assert [(both, "ok")] == judged(CONTROL, MEMORY, *GPUS)
    assert [(both, "ok")] == judged(CONTROL, MEMORY, gpus=None)


def test_fewer_files_than_gpus_are_a_note():
    assert [("/dev/nvidiaN", "note")] == judged(CONTROL, MEMORY, GPUS[0])


@pytest.mark.parametrize(
    ("access", "verdict"),
    [
        (NodeAccess.MISSING, "WRONG"),
        (NodeAccess.FORBIDDEN, "WRONG"),
        (NodeAccess.FAILED, "WRONG"),
        (NodeAccess.DENIED, "unknown"),
    ],
)
def test_a_control_file_that_cannot_be_opened_is_named(access: NodeAccess, verdict: str):
    broken = DeviceNode("/dev/nvidia-uvm", access, "why")

    assert [("/dev/nvidia-uvm", verdict)] == judged(CONTROL, broken, *GPUS)


def test_the_systems_word_for_a_failure_is_told():
    broken = DeviceNode("/dev/nvidiactl", NodeAccess.FAILED, "No such device")
    (found,) = judge_access([broken, MEMORY], None)

    assert "cannot be opened (No such device)" == found.said
    assert "dmesg" in found.advice
