"""What containers keep in their directories is counted and not changed, and the room is known."""

import math
import os
from pathlib import Path

import pytest

from agent import hookdirs as sizes
from agent.errors import StateError
from agent.hookdirs import HostHookDirs, directory_sizes
from tests.host.hook_space import NAME

OTHER = NAME.replace("main", "other")


async def leaf_of(dirs: HostHookDirs, hook: Path, name: str = NAME) -> Path:
    await dirs.prepare(name, wipe=True)
    return hook / "vgpu" / "containers" / name


def handles() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_what_hami_core_keeps_is_not_beyond_and_no_other_name_is_looked_at(dirs, hook):
    leaf = await leaf_of(dirs, hook)
    (leaf / "uuid.cache").write_bytes(bytes(1_200_000))
    (leaf / "vgpulock").touch()
    leaf.with_name(".removed-0").mkdir()

    ((name, size),) = directory_sizes(hook).items()

    assert (NAME, 2, 0, False) == (name, size.entries, size.closed, size.is_beyond)
    assert 1_200_000 <= size.size < 2_000_000


async def test_ten_thousand_and_one_entries_are_beyond_and_no_more_is_looked_at(dirs, hook):
    before = handles()
    for name, count in ((NAME, 10_500), (OTHER, 2)):
        leaf = await leaf_of(dirs, hook, name)
        for number in range(count):
            (leaf / f"{number}").touch()

    found = directory_sizes(hook)

    assert (10_001, True) == (found[NAME].entries, found[NAME].is_beyond)
    assert (2, False) == (found[OTHER].entries, found[OTHER].is_beyond)
    assert before == handles()


async def test_a_sparse_file_and_a_link_to_the_host_are_not_beyond(dirs, hook, tmp_path):
    (tmp_path / "victim").mkdir()
    for number in range(10_500):
        (tmp_path / "victim" / f"{number}").touch()
    leaf = await leaf_of(dirs, hook)
    (leaf / "link").symlink_to(tmp_path / "victim")
    with (leaf / "sparse").open("wb") as file:
        file.truncate(10 * 2**40)

    size = directory_sizes(hook)[NAME]

    assert (2, False) == (size.entries, size.is_beyond)


async def test_a_file_of_several_names_is_one_and_nothing_is_opened_that_could_hang(dirs, hook):
    leaf = await leaf_of(dirs, hook)
    (leaf / "a").write_bytes(bytes(100_000))
    for number in range(20):
        os.link(leaf / "a", leaf / f"a{number}")
    os.mkfifo(leaf / "fifo")
    (leaf / "loop").symlink_to("loop")
    (leaf / os.fsdecode(b"\xff\xfe\n" * 80)).mkdir()

    size = directory_sizes(hook)[NAME]

    assert (24, 0, False) == (size.entries, size.closed, size.is_beyond)
    assert 100_000 <= size.size < 200_000


async def test_counting_ends_with_the_depth_and_with_the_bytes(dirs, hook, monkeypatch):
    before = handles()
    at = os.open(await leaf_of(dirs, hook), os.O_RDONLY)
    for _ in range(100):
        os.mkdir("d", dir_fd=at)
        above, at = at, os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(above)
    os.close(at)
    large = await leaf_of(dirs, hook, OTHER)
    for number in range(10):
        (large / f"{number}").write_bytes(bytes(100_000))
    monkeypatch.setattr(sizes, "BYTES", 250_000)

    found = directory_sizes(hook)

    assert (16, True) == (found[NAME].entries, found[NAME].is_beyond)
    assert found[OTHER].is_beyond
    assert found[OTHER].entries < 10
    assert before == handles()


async def test_the_room_is_that_of_their_file_system_before_and_after_the_first(dirs, hook):
    before = await dirs.room()
    await leaf_of(dirs, hook)
    after = await dirs.room()

    found = os.statvfs(hook)
    for room in (before, after):
        assert room.available == pytest.approx(found.f_bavail * found.f_frsize, rel=0.5)
        assert room.inodes == math.inf or 0 < room.inodes <= found.f_files


async def test_a_file_system_that_counts_no_inodes_has_no_bound_of_them(dirs, monkeypatch):
    real = os.statvfs

    def without(path: Path) -> os.statvfs_result:
        found = list(real(path))
        found[5:8] = 0, 0, 0
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", without)

    assert math.inf == (await dirs.room()).inodes


async def test_a_hook_path_that_is_missing_is_said(dirs, hook):
    hook.rmdir()

    with pytest.raises(StateError, match=r"make the directory .*hook, owned by root"):
        await dirs.room()
