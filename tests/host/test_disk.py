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
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
async def disk(state):
    disk = await HostDisk.open(state, Inline())
    yield disk
    disk.close()


def modes(*paths):
    return [stat.S_IMODE(path.stat().st_mode) for path in paths]


async def test_files_are_for_the_owner_only_and_nothing_else_is_left(disk, state):
    for generation in (b"1", b"2"):
        await disk.replace("state.json", generation, keep="state.json.1")
        await disk.replace("health.json", generation)

    names = {path.name for path in state.iterdir()}
    assert {"state.json", "state.json.1", "health.json"} == names
    assert [0o600] * 3 == modes(*state.iterdir())
    assert [0] == [mode & 0o027 for mode in modes(state)]


async def test_the_directory_that_was_opened_is_the_one_that_is_used(disk, state):
    state.rename(state.with_name("moved"))
    state.mkdir()

    await disk.replace("state.json", b"1")

    assert b"1" == (state.with_name("moved") / "state.json").read_bytes()
    assert [] == list(state.iterdir())


async def test_no_generation_and_nothing_that_is_no_file_of_ours_is_followed_or_written_over(
    disk, state, tmp_path
):
    victim, spare = tmp_path / "victim", state / ".state.json.new"
    victim.write_bytes(b"mine")
    (state / "state.json").symlink_to(victim)
    with pytest.raises(StateError, match="cannot be read"):
        await disk.read("state.json")

    for number, make in enumerate((spare.symlink_to, spare.hardlink_to, spare.symlink_to), 1):
        make(state / "state.json" if make == spare.hardlink_to else victim)
        await disk.replace("state.json", b"%d" % number, keep="state.json.1")
        assert b"%d" % number == await disk.read("state.json")
        if number > 1:
            assert b"%d" % (number - 1) == await disk.read("state.json.1")
    assert b"mine" == victim.read_bytes()


async def test_what_is_no_file_is_refused_by_name(disk, state):
    (state / "folder").mkdir()
    os.mkfifo(state / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(StateError, match=f"{name} is not a file"):
            await disk.read(name)


async def test_an_error_says_what_is_wrong(disk, state, tmp_path):
    failing, faults = await with_faults(tmp_path / "s")
    faults.fail_at(1, errno.ENOSPC)
    with pytest.raises(StateError, match=r"s/state\.json cannot be written: ENOSPC; look at"):
        await failing.replace("state.json", b"1")
    failing.close()

    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="file cannot be opened: File exists"):
        await HostDisk.open(tmp_path / "file", Inline())

    await disk.check()
    state.rmdir()
    with pytest.raises(StateError, match=r"No such file or directory; look at the .* restart"):
        await disk.check()


@pytest.mark.parametrize(("before", "after"), [(0o777, 0o775), (0o1777, 0o1775), (0o755, 0o755)])
@pytest.mark.parametrize("ours", [True, False])
async def test_a_directory_that_everybody_may_write_is_closed_to_them(
    state, before, after, ours, monkeypatch
):
    def refused(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    state.mkdir()
    state.chmod(before)
    if not ours:
        monkeypatch.setattr(os, "fchmod", refused)

    (await HostDisk.open(state, Inline())).close()

    assert [after if ours else before] == modes(state)


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


@pytest.mark.parametrize("keep", [None, "previous"])
@pytest.mark.parametrize("power_loss", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_a_death_at_any_step_leaves_whole_generations_and_the_next_replace_goes_well(
    keep, power_loss, seed
):
    step, is_done = 0, False
    while not is_done:
        files = MemoryFiles(Seeded(seed))
        faults = DiskFaults(files)
        for data in (OLD, NEW):
            replace(faults, "state", data, keep)
        faults.steps = 0
        faults.kill_at(step)
        try:
            replace(faults, "state", NEWER, keep)
        except Killed:
            step += 1
        else:
            is_done = True
            assert {"state"} | ({keep} if keep else set()) == set(files.names)
        if power_loss:
            files.crash()

        def content(name, files=files):
            return files.names[name].data if name in files.names else None

        found = content("state")
        assert found in ({NEWER} if is_done else {NEW, NEWER})
        # While it moves up, the spare generation may be missing, and the current one is there.
        assert content("previous") in ({OLD, NEW, None} if keep else {None})
        if keep and found == NEWER:
            assert NEW == content("previous")

        faults.revive()
        replace(faults, "state", b"after", keep)
        assert b"after" == content("state")
        assert (found if keep else None) == content("previous")
        assert {"state"} | ({keep} if keep else set()) == set(files.names)
    assert step > 2
