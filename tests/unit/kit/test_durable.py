"""replace(): at whatever step it is cut off, some whole generation is there to be read."""

import errno

import pytest

from agent.kit.durable import replace
from tests.fakes.chance import Seeded
from tests.fakes.disk import Faults, Killed, MemoryFiles

OLD, NEW, NEWER = b"generation 1 of it", b"generation 2", b"generation 3 which is a long one"
KEEPS = [None, "previous"]
SEEDS = range(40)


def with_generations(seed, keep):
    files = MemoryFiles(Seeded(seed))
    faults = Faults(files)
    replace(faults, "state", OLD, keep)
    replace(faults, "state", NEW, keep)
    faults.steps = 0
    return files, faults


def steps_of_a_replace(keep):
    _, faults = with_generations(0, keep)
    replace(faults, "state", NEWER, keep)
    return faults.steps


def content(files, name):
    found = files.names.get(name)
    return found and found.data


@pytest.mark.parametrize("keep", KEEPS)
def test_a_replace_changes_the_content_and_leaves_no_litter(keep):
    files, faults = with_generations(0, keep)

    replace(faults, "state", NEWER, keep)

    assert NEWER == content(files, "state")
    assert (NEW if keep else None) == content(files, "previous")
    assert {"state", keep} - {None} == set(files.names)


@pytest.mark.parametrize("keep", KEEPS)
def test_a_replace_that_returned_outlives_a_power_loss(keep):
    for seed in SEEDS:
        files, faults = with_generations(seed, keep)
        replace(faults, "state", NEWER, keep)

        files.crash()

        assert NEWER == content(files, "state")
        assert (NEW if keep else None) == content(files, "previous")


@pytest.mark.parametrize("keep", KEEPS)
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


@pytest.mark.parametrize("keep", KEEPS)
def test_after_a_death_at_any_step_the_next_replace_goes_well(keep):
    for step in range(steps_of_a_replace(keep)):
        files, faults = with_generations(step, keep)
        faults.kill_at(step)
        with pytest.raises(Killed):
            replace(faults, "state", NEWER, keep)
        faults.revive()
        before = content(files, "state")

        replace(faults, "state", b"after", keep)

        assert b"after" == content(files, "state")
        assert (before if keep else None) == content(files, "previous")
        assert {"state", keep} - {None} == set(files.names)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_step_leaves_the_old_content(keep, code):
    failures = []
    for step in range(steps_of_a_replace(keep)):
        files, faults = with_generations(step, keep)
        faults.fail_at(step, code)
        try:
            replace(faults, "state", NEWER, keep)
        except OSError as error:
            failures.append(error.errno)
            expected = NEW
        else:
            expected = NEWER

        assert expected == content(files, "state")
        assert ".state.new" not in files.names

    assert len(failures) >= 6
    assert {code} == set(failures)


def test_a_first_replace_whose_directory_cannot_be_synced_leaves_nothing():
    files = MemoryFiles()
    faults = Faults(files)
    replace(faults, "state", OLD)
    steps = faults.steps
    files = MemoryFiles()
    faults = Faults(files)
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
