"""replace(): at whatever step it is cut off, some whole generation is there to be read."""

import errno

import pytest

from agent.host.files import replace
from tests.fakes.chance import Seeded
from tests.fakes.disk import DiskFaults, Killed, MemoryFiles

OLD, NEW, NEWER = b"generation 1 of it", b"generation 2", b"generation 3 which is a long one"
KEPT = pytest.mark.parametrize("keep", [None, "previous"])
SEEDS = range(10)


def with_generations(seed, keep):
    files = MemoryFiles(Seeded(seed))
    faults = DiskFaults(files)
    for data in (OLD, NEW):
        replace(faults, "state", data, keep)
    faults.steps = 0
    return files, faults


def steps_of_a_replace(keep):
    _, faults = with_generations(0, keep)
    replace(faults, "state", NEWER, keep)
    return faults.steps


def content(files, name):
    found = files.names.get(name)
    return found and found.data


@KEPT
def test_a_replace_changes_the_content_and_leaves_no_litter(keep):
    files, faults = with_generations(0, keep)

    replace(faults, "state", NEWER, keep)

    assert NEWER == content(files, "state")
    assert (NEW if keep else None) == content(files, "previous")
    assert ({"state", keep} if keep else {"state"}) == set(files.names)


@KEPT
def test_a_replace_that_returned_outlives_a_power_loss(keep):
    for seed in SEEDS:
        files, faults = with_generations(seed, keep)
        replace(faults, "state", NEWER, keep)

        files.crash()

        assert NEWER == content(files, "state")
        assert (NEW if keep else None) == content(files, "previous")


@KEPT
@pytest.mark.parametrize("power_loss", [False, True])
def test_a_death_at_any_step_leaves_whole_generations(keep, power_loss):
    for step in range(steps_of_a_replace(keep)):
        for seed in SEEDS:
            files, faults = with_generations(seed, keep)
            faults.kill_at(step)
            with pytest.raises(Killed):
                replace(faults, "state", NEWER, keep)
            if power_loss:
                files.crash()

            assert content(files, "state") in {NEW, NEWER}
            assert content(files, "previous") in ({OLD, NEW} if keep else {None})
            if keep and content(files, "state") == NEWER:
                assert NEW == content(files, "previous")


@KEPT
def test_after_a_death_at_any_step_the_next_replace_goes_well(keep):
    for step in range(steps_of_a_replace(keep)):
        files, faults = with_generations(step, keep)
        faults.kill_at(step)
        with pytest.raises(Killed):
            replace(faults, "state", NEWER, keep)
        faults.revive()
        found = content(files, "state")

        replace(faults, "state", b"after", keep)

        assert b"after" == content(files, "state")
        assert (found if keep else None) == content(files, "previous")
        assert ({"state", keep} if keep else {"state"}) == set(files.names)


def test_a_first_replace_whose_directory_cannot_be_synced_leaves_nothing():
    files = MemoryFiles()
    faults = DiskFaults(files)
    replace(faults, "state", OLD)
    steps = faults.steps
    files = MemoryFiles()
    faults = DiskFaults(files)
    faults.fail_at(steps - 2, errno.EIO)

    with pytest.raises(OSError, match="EIO"):
        replace(faults, "state", OLD)

    assert {} == files.names


def test_an_empty_content_is_a_content():
    files = MemoryFiles()

    replace(files, "state", b"")

    assert b"" == content(files, "state")


def test_what_a_dead_process_began_is_not_written_on():
    files, faults = with_generations(0, None)
    faults.kill_at(4)
    with pytest.raises(Killed):
        replace(faults, "state", NEWER)
    begun = files.names[".state.new"]
    faults.revive()

    replace(faults, "state", NEWER)

    assert files.names["state"] is not begun


@KEPT
def test_a_full_disk_refuses_every_generation_until_it_has_room(keep):
    files, _ = with_generations(0, keep)
    before = dict(files.names)
    files.full = True
    for _ in range(3):
        with pytest.raises(OSError, match="ENOSPC"):
            replace(files, "state", NEWER, keep)
    files.crash()
    assert before["state"] is files.names["state"]

    files.full = False
    replace(files, "state", NEWER, keep)

    assert (NEWER, NEW if keep else None) == (content(files, "state"), content(files, "previous"))


def test_the_third_file_of_an_earlier_agent_is_removed():
    files, _ = with_generations(0, "previous")
    files.link("previous", ".state.spent")
    files.create(".state.new")

    replace(files, "state", NEWER, "previous")

    assert {"state", "previous"} == set(files.names)
