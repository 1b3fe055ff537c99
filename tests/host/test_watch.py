"""DirectoryWatch on real inotify: sockets come, go and are made anew, and so is the directory."""

import asyncio
import contextlib
import errno
import gc
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import pytest
import structlog
from asyncinotify import Inotify

from agent.errors import KubeletError
from agent.host import files as watch
from agent.host.files import DirectoryWatch, follow_files
from agent.host.process import Worker

pytestmark = pytest.mark.looptime(False)

NAMES = frozenset({"kubelet.sock", "ours.sock"})

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "device-plugins").mkdir()
    return tmp_path / "device-plugins"


@contextlib.asynccontextmanager
async def following(directory, names=NAMES):
    """Changes as they come, the first look already taken."""
    async with contextlib.aclosing(DirectoryWatch(directory, lambda: names).changes()) as changes:
        assert "" == await anext(changes)
        yield changes


async def take(changes, count):
    return [await anext(changes) for _ in range(count)]


def touch(path):
    path.write_bytes(b"")


async def test_names_that_come_and_go_are_told(directory):
    async with following(directory) as changes:
        touch(directory / "kubelet.sock")
        assert ["kubelet.sock"] == await take(changes, 1)
        touch(directory / "ours.sock")
        (directory / "kubelet.sock").unlink()

        assert ["ours.sock", "kubelet.sock"] == await take(changes, 2)


async def test_only_exact_names_are_told(directory):
    async with following(directory) as changes:
        for name in ("kubelet.sock2", "akubelet.sock", "device-plugins", "nvidia.sock"):
            touch(directory / name)
        touch(directory.parent / "kubelet.sock")
        touch(directory / "kubelet.sock")

        assert ["kubelet.sock"] == await take(changes, 1)
        assert (directory / "nvidia.sock").exists()


async def test_names_may_be_added_later(directory):
    names = {"kubelet.sock"}
    async with following(directory, names) as changes:
        names.add("late.sock")
        touch(directory / "late.sock")

        assert ["late.sock"] == await take(changes, 1)


async def test_a_socket_made_anew_at_once_is_seen(directory):
    touch(directory / "kubelet.sock")
    async with following(directory) as changes:
        (directory / "kubelet.sock").unlink()
        touch(directory / "kubelet.sock")

        assert ["kubelet.sock", "kubelet.sock"] == await take(changes, 2)


async def test_a_socket_moved_into_place_is_seen(directory):
    touch(directory.parent / "new")
    async with following(directory) as changes:
        (directory.parent / "new").rename(directory / "kubelet.sock")

        assert ["kubelet.sock"] == await take(changes, 1)


async def test_a_directory_that_comes_later_is_watched_from_then_on(tmp_path):
    directory = tmp_path / "device-plugins"
    async with following(directory) as changes:
        touch(tmp_path / "other")
        directory.mkdir()
        assert [""] == await take(changes, 1)
        touch(directory / "kubelet.sock")

        assert ["kubelet.sock"] == await take(changes, 1)


async def test_a_directory_that_is_replaced_is_watched_anew(directory):
    async with following(directory) as changes:
        directory.rename(directory.parent / "old")
        assert [""] == await take(changes, 1)
        directory.mkdir()
        assert [""] == await take(changes, 1)
        touch(directory.parent / "old" / "kubelet.sock")
        touch(directory / "ours.sock")

        assert ["ours.sock"] == await take(changes, 1)


async def test_a_parent_that_is_removed_is_survived(directory, monkeypatch):
    monkeypatch.setattr(watch, "POLL", 0.02)
    async with following(directory) as changes:
        shutil.rmtree(directory.parent)
        assert [""] == await take(changes, 1)
        directory.mkdir(parents=True)
        touch(directory / "kubelet.sock")
        while "kubelet.sock" not in await take(changes, 1):
            assert (directory / "kubelet.sock").exists()
        assert [""] == await take(changes, 1)
        touch(directory / "ours.sock")

        assert ["ours.sock"] == await take(changes, 1)


async def test_what_inotify_missed_is_found_by_looking(directory, monkeypatch):
    monkeypatch.setattr(watch, "POLL", 0.02)
    monkeypatch.setattr(Inotify, "add_watch", lambda *_: None)
    async with following(directory) as changes:
        touch(directory / "kubelet.sock")
        assert ["kubelet.sock"] == await take(changes, 1)
        directory.rename(directory.parent / "old")

        assert {"kubelet.sock", ""} == set(await take(changes, 2))


async def test_without_inotify_the_files_are_looked_at(directory, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watch, "POLL", 0.02)
    monkeypatch.setattr(Inotify, "add_watch", refuse)
    with structlog.testing.capture_logs() as logs:
        async with following(directory) as changes:
            touch(directory / "kubelet.sock")

            assert ["kubelet.sock", ""] == await take(changes, 2)

    assert ("watch.polling", "No space left on device") == (logs[0]["event"], logs[0]["err"])


async def test_an_overflow_asks_to_look_at_everything(directory):
    with open("/proc/sys/fs/inotify/max_queued_events") as file:  # noqa: ASYNC230, PTH123 -- /proc
        limit = int(file.read())
    with structlog.testing.capture_logs() as logs:
        async with following(directory) as changes:
            for _ in range(limit // 2 + 8):
                touch(directory / "noise")
                (directory / "noise").unlink()

            assert [""] == await take(changes, 1)

    assert ["watch.overflow"] == [line["event"] for line in logs]


def test_the_epoch_changes_with_the_socket(directory):
    watched = DirectoryWatch(directory, lambda: NAMES)
    assert None is watched.epoch()
    touch(directory / "kubelet.sock")
    first = watched.epoch()
    assert first == watched.epoch()
    (directory / "kubelet.sock").unlink()
    touch(directory / "kubelet.sock")
    os.utime(directory / "kubelet.sock")

    assert None is not first
    assert first != watched.epoch()
    assert watched.exists("kubelet.sock")
    assert not watched.exists("ours.sock")


def test_a_directory_that_may_not_be_looked_at_is_said(tmp_path):
    name = "x" * 300
    with pytest.raises(KubeletError, match="cannot be looked at: File name too long"):
        DirectoryWatch(tmp_path, lambda: NAMES).exists(name)


# A file of HAMi-core that vanishes or changes is told at once, wherever inotify tells of it.


@contextlib.asynccontextmanager
async def telling(*paths: Path) -> AsyncIterator[asyncio.Queue[None]]:
    """What is told of these files from now on."""
    told = asyncio.Queue[None]()
    async with Worker("look", 2) as worker, asyncio.TaskGroup() as group:
        task = group.create_task(follow_files(paths, lambda: told.put_nowait(None), worker))
        await asyncio.sleep(0.05)
        yield told
        task.cancel()


async def is_told(told: asyncio.Queue[None]) -> None:
    """Return once something is told; what came with it is taken too."""
    async with asyncio.timeout(30):
        await told.get()
    await asyncio.sleep(0.05)
    while not told.empty():
        told.get_nowait()


def in_place(path: Path) -> None:
    path.write_text("new")


def by_rename(path: Path) -> None:
    (path.parent / ".new").write_text("new")
    (path.parent / ".new").rename(path)


@pytest.mark.parametrize("edit", [in_place, by_rename, Path.unlink])
async def test_every_way_to_change_a_file_is_told_at_once(
    tmp_path, edit: Callable[[Path], None], monkeypatch
):
    monkeypatch.setattr(watch, "POLL", 1e6)
    path = tmp_path / "libvgpu.so"
    path.write_text("old")
    async with telling(tmp_path / "ld.so.preload", path) as told:
        (tmp_path / "noise").write_text("x")
        await asyncio.sleep(0.05)
        assert told.empty()
        edit(path)
        await is_told(told)


async def test_a_directory_that_goes_is_told_and_one_that_comes_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "POLL", 0.02)
    path = tmp_path / "vgpu" / "libvgpu.so"
    async with telling(path) as told:
        for turn in range(2):
            path.parent.mkdir()
            await asyncio.sleep(0.1)
            path.write_text("new")
            await is_told(told)
            path.parent.rename(tmp_path / f"aside-{turn}")
            await is_told(told)


async def test_without_inotify_nothing_is_told_and_nothing_fails(tmp_path, monkeypatch):
    def refuse(**_: object) -> Inotify:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(watch, "Inotify", refuse)
    with structlog.testing.capture_logs() as logs:
        async with telling(tmp_path / "libvgpu.so") as told:
            (tmp_path / "libvgpu.so").write_text("new")
            await asyncio.sleep(0.05)
            assert told.empty()

    assert ["watch.without_events"] == [line["event"] for line in logs]


async def test_leaving_gives_back_every_descriptor_also_if_the_disk_answers_later(tmp_path):
    gc.collect()  # what other tests have left is closed now, and not between the counts
    before = descriptors()
    works: list[Callable[[], object]] = []

    class Late:
        async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
            works.append(lambda: work(*args))
            await asyncio.Event().wait()
            raise AssertionError

    async with asyncio.TaskGroup() as group:
        task = group.create_task(follow_files([tmp_path / "x"], lambda: None, Late()))
        await asyncio.sleep(0.05)
        task.cancel()
    works[0]()

    assert before == descriptors()


def descriptors() -> int:
    """How many are open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- as cheap as it gets
