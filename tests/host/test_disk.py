"""HostDisk on a real directory: what it leaves there, refuses, and how it takes a kill."""

import errno
import os
import stat

import pytest

from agent.errors import StateError
from agent.host.system import HostDisk, replace
from tests.fakes.chance import Seeded
from tests.fakes.disk import DiskFaults, Killed, MemoryFiles, with_faults
from tests.fakes.offload import Inline


@pytest.fixture
async def disk(tmp_path):
    disk = await HostDisk.open(tmp_path / "state", Inline())
    yield disk
    disk.close()


async def test_files_are_for_the_owner_only_and_nothing_else_is_left(disk, tmp_path):
    for generation in (b"1", b"2"):
        await disk.replace("state.json", generation, keep="state.json.1")
        await disk.replace("health.json", generation)

    found = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state").iterdir()
    }
    assert {"state.json": 0o600, "state.json.1": 0o600, "health.json": 0o600} == found
    assert 0 == stat.S_IMODE((tmp_path / "state").stat().st_mode) & 0o027


async def test_the_directory_that_was_opened_is_the_one_that_is_used(disk, tmp_path):
    (tmp_path / "state").rename(tmp_path / "moved")
    (tmp_path / "state").mkdir()

    await disk.replace("state.json", b"1")

    assert b"1" == (tmp_path / "moved" / "state.json").read_bytes()
    assert [] == list((tmp_path / "state").iterdir())


async def test_a_link_in_the_place_of_a_file_is_not_followed(disk, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "state" / "state.json").symlink_to(victim)
    (tmp_path / "state" / ".state.json.new").symlink_to(victim)

    with pytest.raises(StateError, match="cannot be read"):
        await disk.read("state.json")
    await disk.replace("state.json", b"1")

    assert b"mine" == victim.read_bytes()
    assert b"1" == await disk.read("state.json")


async def test_no_generation_is_written_over_and_nothing_that_is_no_file_of_ours(disk, tmp_path):
    spare, victim = tmp_path / "state" / ".state.json.new", tmp_path / "victim"
    victim.write_bytes(b"mine")
    for number in range(3):
        await disk.replace("state.json", b"%d" % number, keep="state.json.1")

    spare.unlink(missing_ok=True)
    os.link(tmp_path / "state" / "state.json", spare)
    await disk.replace("state.json", b"3", keep="state.json.1")
    assert (b"3", b"2") == (await disk.read("state.json"), await disk.read("state.json.1"))

    spare.symlink_to(victim)
    await disk.replace("state.json", b"4", keep="state.json.1")
    assert (b"4", b"3") == (await disk.read("state.json"), await disk.read("state.json.1"))
    assert b"mine" == victim.read_bytes()


async def test_what_is_no_file_is_refused_by_name(disk, tmp_path):
    (tmp_path / "state" / "folder").mkdir()
    os.mkfifo(tmp_path / "state" / "pipe")

    for name in ("folder", "pipe"):
        with pytest.raises(StateError, match=f"{name} is not a file"):
            await disk.read(name)


async def test_an_error_says_what_is_wrong(tmp_path):
    disk, faults = await with_faults(tmp_path / "s")
    faults.fail_at(1, errno.ENOSPC)

    with pytest.raises(StateError, match=r"s/state\.json cannot be written: ENOSPC; look at"):
        await disk.replace("state.json", b"1")
    disk.close()


async def test_a_directory_that_cannot_be_opened_is_said(tmp_path):
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(StateError, match="file cannot be opened: File exists"):
        await HostDisk.open(tmp_path / "file", Inline())


async def test_a_look_finds_a_state_directory_that_was_removed(disk, tmp_path):
    await disk.check()
    (tmp_path / "state").rmdir()

    with pytest.raises(StateError, match=r"No such file or directory; look at the .* restart"):
        await disk.check()


@pytest.mark.parametrize(("before", "after"), [(0o777, 0o775), (0o1777, 0o1775), (0o755, 0o755)])
@pytest.mark.parametrize("ours", [True, False])
async def test_a_directory_that_everybody_may_write_is_closed_to_them(
    tmp_path, before, after, ours, monkeypatch
):
    def refused(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path = tmp_path / "state"
    path.mkdir()
    path.chmod(before)
    if not ours:
        monkeypatch.setattr(os, "fchmod", refused)

    (await HostDisk.open(path, Inline())).close()

    assert (after if ours else before) == stat.S_IMODE(path.stat().st_mode)


async def test_content_and_second_name_are_on_disk_before_the_content_gets_its_name(
    disk, monkeypatch
):
    steps = list[str]()

    def fsync(handle):
        found = os.fstat(handle)
        steps.append("names" if stat.S_ISDIR(found.st_mode) else f"{found.st_size} bytes")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", lambda *_, **__: steps.append("rename"))
    await disk.replace("state.json", b"12345", keep="state.json.1")

    assert ["5 bytes", "names", "rename", "names"] == steps


# replace(): at whatever step it is cut off, some whole generation is there to be read.


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
@pytest.mark.parametrize("power_loss", [False, True])
def test_a_replace_that_returned_leaves_no_litter_and_outlives_a_power_loss(keep, power_loss):
    for seed in SEEDS:
        files, faults = with_generations(seed, keep)
        replace(faults, "state", NEWER, keep)
        assert ({"state", keep} if keep else {"state"}) == set(files.names)
        if power_loss:
            files.crash()

        assert NEWER == content(files, "state")
        assert (NEW if keep else None) == content(files, "previous")


@KEPT
@pytest.mark.parametrize("power_loss", [False, True])
def test_a_death_at_any_step_leaves_whole_generations_and_the_next_replace_goes_well(
    keep, power_loss
):
    for step in range(steps_of_a_replace(keep)):
        for seed in SEEDS:
            files, faults = with_generations(seed, keep)
            faults.kill_at(step)
            with pytest.raises(Killed):
                replace(faults, "state", NEWER, keep)
            if power_loss:
                files.crash()

            found = content(files, "state")
            assert found in {NEW, NEWER}
            # While it moves up, the spare generation may be missing, and the current one is there.
            assert content(files, "previous") in ({OLD, NEW, None} if keep else {None})
            if keep and found == NEWER:
                assert NEW == content(files, "previous")

            faults.revive()
            replace(faults, "state", b"after", keep)
            assert b"after" == content(files, "state")
            assert (found if keep else None) == content(files, "previous")
            assert ({"state", keep} if keep else {"state"}) == set(files.names)


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
