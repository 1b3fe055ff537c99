"""replace(): at whatever step it is cut off, some whole generation is there to be read."""

import errno

import pytest

from agent.host.files import GROWTH, STEP, replace, unpadded
from tests.fakes.chance import Seeded
from tests.fakes.disk import DiskFaults, Killed, MemoryFiles

OLD, NEW, NEWER = b"generation 1 of it", b"generation 2", b"generation 3 which is a long one"
SPARE = ".state.new"
LONG = b"x" * 3 * STEP
WAYS = [(None, ()), ("previous", ()), ("previous", (b"first", LONG)), ("previous", (LONG, b"2nd"))]
"""`keep`, and what was written before OLD; with two files before it, a spare is there."""
SEEDS = range(10)


def with_generations(seed, keep, before):
    files = MemoryFiles(Seeded(seed))
    faults = DiskFaults(files)
    for data in (*before, OLD, NEW):
        replace(faults, "state", data, keep)
    assert (SPARE in files.names) == bool(before)
    faults.steps = 0
    return files, faults


def steps_of_a_replace(keep, before):
    _, faults = with_generations(0, keep, before)
    replace(faults, "state", NEWER, keep)
    return faults.steps


def content(files, name):
    found = files.names.get(name)
    return found and unpadded(found.data)


@pytest.mark.parametrize(("keep", "before"), WAYS)
def test_a_replace_changes_the_content_and_leaves_no_litter(keep, before):
    files, faults = with_generations(0, keep, before)

    replace(faults, "state", NEWER, keep)

    assert NEWER == content(files, "state")
    assert (NEW if keep else None) == content(files, "previous")
    assert ({"state", keep, SPARE} if keep else {"state"}) == set(files.names)


@pytest.mark.parametrize(("keep", "before"), WAYS)
def test_a_replace_that_returned_outlives_a_power_loss(keep, before):
    for seed in SEEDS:
        files, faults = with_generations(seed, keep, before)
        replace(faults, "state", NEWER, keep)

        files.crash()

        assert NEWER == content(files, "state")
        assert (NEW if keep else None) == content(files, "previous")


@pytest.mark.parametrize(("keep", "before"), WAYS)
@pytest.mark.parametrize("power_loss", [False, True])
def test_a_death_at_any_step_leaves_whole_generations(keep, before, power_loss):
    for step in range(steps_of_a_replace(keep, before)):
        for seed in SEEDS:
            files, faults = with_generations(seed, keep, before)
            faults.kill_at(step)
            with pytest.raises(Killed):
                replace(faults, "state", NEWER, keep)
            if power_loss:
                files.crash()

            assert content(files, "state") in {NEW, NEWER}
            assert content(files, "previous") in ({OLD, NEW} if keep else {None})
            if keep and content(files, "state") == NEWER:
                assert NEW == content(files, "previous")


@pytest.mark.parametrize(("keep", "before"), WAYS)
def test_after_a_death_at_any_step_the_next_replace_goes_well(keep, before):
    for step in range(steps_of_a_replace(keep, before)):
        files, faults = with_generations(step, keep, before)
        faults.kill_at(step)
        with pytest.raises(Killed):
            replace(faults, "state", NEWER, keep)
        faults.revive()
        found = content(files, "state")

        replace(faults, "state", b"after", keep)

        assert b"after" == content(files, "state")
        assert (found if keep else None) == content(files, "previous")
        assert set(files.names) <= {"state", keep, SPARE}
        assert keep or {"state"} == set(files.names)


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
    files, faults = with_generations(0, None, ())
    faults.kill_at(4)
    with pytest.raises(Killed):
        replace(faults, "state", NEWER)
    begun = files.names[SPARE]
    faults.revive()

    replace(faults, "state", NEWER)

    assert files.names["state"] is not begun


@pytest.mark.parametrize("cut_off", [None, *range(steps_of_a_replace("previous", (b"1", b"2")))])
def test_on_a_full_disk_generation_after_generation_is_written(cut_off):
    files, faults = with_generations(0, "previous", (b"1", b"2"))
    files.full = True
    if cut_off is not None:
        faults.kill_at(cut_off)
        with pytest.raises(Killed):
            replace(faults, "state", NEWER, "previous")
        faults.revive()

    for number in range(9):
        data = b"%d" % number * (1 + number * GROWTH // 9)
        replace(faults, "state", data, "previous")
        files.crash()

        assert data == content(files, "state")


def test_what_needs_more_room_than_a_full_disk_has_is_refused_until_it_has_some():
    files, _ = with_generations(0, "previous", (b"1", b"2"))
    files.full = True

    for _ in range(3):
        with pytest.raises(OSError, match="ENOSPC"):
            replace(files, "state", LONG, "previous")
    replace(files, "state", NEWER, "previous")
    files.full = False
    replace(files, "state", LONG, "previous")

    assert (LONG, NEWER) == (content(files, "state"), content(files, "previous"))


def test_a_spare_that_could_not_be_synced_is_not_written_on():
    files, faults = with_generations(0, "previous", (b"1", b"2"))
    spare = files.names[SPARE]
    spare_is_synced = 3
    faults.fail_at(spare_is_synced, errno.EIO)
    with pytest.raises(OSError, match="EIO"):
        replace(faults, "state", NEWER, "previous")

    replace(faults, "state", NEWER, "previous")

    assert all(one is not spare for one in files.names.values())


def test_no_generation_is_written_over_by_whatever_name_else_it_goes():
    files, _ = with_generations(0, "previous", (b"1", b"2"))
    files.unlink(SPARE)
    files.link("state", SPARE)

    replace(files, "state", NEWER, "previous")

    assert (NEWER, NEW) == (content(files, "state"), content(files, "previous"))


def test_after_a_large_generation_the_files_are_small_again():
    files, _ = with_generations(0, "previous", (LONG, LONG))

    for _ in range(3):
        replace(files, "state", NEWER, "previous")

    assert {STEP} == {len(one.data) for one in files.names.values()}
