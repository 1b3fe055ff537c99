"""What containers keep in their directories is counted part by part, and changes nothing."""

import asyncio
import math
import os
import threading
from pathlib import Path

import pytest

from agent.core.errors import StateError
from agent.core.reconcile.measuring import DirectorySize
from agent.host.hook.directories import HostHookDirs
from agent.host.worker import Worker
from tests.host.hook_space import NAME

OTHER = NAME.replace("main", "other")


async def leaf_of(dirs: HostHookDirs, hook: Path, name: str = NAME) -> Path:
    await dirs.prepare(name, wipe=True)
    return hook / "vgpu" / "containers" / name


def handles() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def size_of(dirs: HostHookDirs, name: str = NAME) -> tuple[DirectorySize, int]:
    """What the last part says, and how many there were."""
    size, parts = await dirs.measure(name, anew=True), 1
    while size.more:
        size, parts = await dirs.measure(name, anew=False), parts + 1
    return size, parts


async def test_what_hami_core_keeps_is_not_large(dirs, hook):
    leaf = await leaf_of(dirs, hook)
    (leaf / "uuid.cache").write_bytes(bytes(1_200_000))
    (leaf / "vgpulock").touch()

    size, _ = await size_of(dirs)

    assert (2, 0, False) == (size.entries, size.closed, size.is_large)
    assert 1_200_000 <= size.allocated < 2_000_000


async def test_one_that_is_not_there_holds_nothing(dirs, hook):
    assert DirectorySize() == await dirs.measure(NAME, anew=True)
    await leaf_of(dirs, hook)

    assert DirectorySize() == await dirs.measure(OTHER, anew=True)


async def test_a_name_that_is_no_pod_and_container_is_refused(dirs):
    with pytest.raises(StateError, match="is not of the form <pod UID>_<container>"):
        await dirs.measure("../..", anew=True)


async def test_ten_thousand_and_one_entries_are_large_and_no_more_is_looked_at(dirs, hook):
    leaf = await leaf_of(dirs, hook)
    for number in range(10_500):
        (leaf / f"{number}").touch()

    size, parts = await size_of(dirs)

    assert (10_001, True) == (size.entries, size.is_large)
    assert 10 < parts


async def test_the_parts_of_one_are_given_up_for_the_next(dirs, hook, monkeypatch):
    monkeypatch.setattr("agent.host.hook.sizes.SLICE_ENTRIES", 3)
    for name, count in ((NAME, 20), (OTHER, 2)):
        leaf = await leaf_of(dirs, hook, name)
        for number in range(count):
            (leaf / f"{number}").touch()
    before = handles()

    assert DirectorySize(4096, 3, more=True) == await dirs.measure(NAME, anew=True)
    assert 2 == (await dirs.measure(OTHER, anew=True)).entries
    assert 3 == (await dirs.measure(NAME, anew=False)).entries
    assert 20 == (await size_of(dirs))[0].entries
    assert before == handles()


async def test_a_sparse_file_and_a_link_to_the_host_are_not_large(dirs, hook, tmp_path):
    (tmp_path / "victim").mkdir()
    for number in range(10_500):
        (tmp_path / "victim" / f"{number}").touch()
    leaf = await leaf_of(dirs, hook)
    (leaf / "link").symlink_to(tmp_path / "victim")
    with (leaf / "sparse").open("wb") as file:
        file.truncate(10 * 2**40)

    size, _ = await size_of(dirs)

    assert (2, False) == (size.entries, size.is_large)


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


async def test_no_look_is_waited_for_by_what_is_made_beside_it(hook, tmp_path):
    async with Worker("disk", 4) as disk, Worker("clearing", 2) as clearing:
        dirs = HostHookDirs(hook, tmp_path, "", disk, clearing)
        await dirs.prepare(NAME, wipe=True)
        held, begun = threading.Event(), threading.Event()

        def hang() -> None:
            begun.set()
            held.wait()

        async with asyncio.TaskGroup() as group:
            group.create_task(clearing.call(hang))
            look = group.create_task(dirs.measure(NAME, anew=True))
            try:
                await asyncio.to_thread(begun.wait)
                await dirs.prepare(OTHER, wipe=True)
                await dirs.remove(OTHER)
                assert not look.done()
            finally:
                held.set()
        assert DirectorySize() != look.result()
        assert not look.result().is_large
