"""What is said of a disk that fails or is silent."""

import pytest

from agent.allocate.service import AllocateStep, disk_refusal
from agent.errors import RefusalReason, StateError


@pytest.mark.parametrize("step", AllocateStep)
def test_only_the_hook_path_and_its_directories_are_told_as_such(step: AllocateStep):
    refusal = disk_refusal(StateError("no space left"), step)

    is_hooks = step in {AllocateStep.DIRECTORY, AllocateStep.HOOK}
    gate = RefusalReason.HOST_DIRECTORY if is_hooks else RefusalReason.STATE_UNWRITABLE
    assert gate is refusal.gate
    assert "(no space left)" in refusal.sentence
    assert refusal.transient


def test_a_silent_disk_is_said_to_be_silent():
    assert "has not answered in time" in disk_refusal(TimeoutError(), AllocateStep.WRITE).sentence
