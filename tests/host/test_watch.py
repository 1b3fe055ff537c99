"""DirectoryWatch on real inotify: sockets come, go and are made anew, and so is the directory."""

import asyncio
import contextlib
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
from agent.host.files import DirectoryWatch, HostFileWatch
from agent.host.process import Worker
from agent.kit.tasks import Offload
from tests.fakes.config_map import MountedMap

pytestmark = pytest.mark.looptime(False)

NAMES = frozenset({"kubelet.sock", "ours.sock"})


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


# FileWatch on real inotify: however people and the kubelet change a settings file, it is told.


R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class ToldChanges:
    """How often something was said to be other."""

    def __init__(self) -> None:
        self.count = 0
        self._news = asyncio.Event()

    def changed(self) -> None:
        self.count += 1
        self._news.set()

    async def next(self) -> None:
        """Wait for news; what came before is taken in."""
        async with asyncio.timeout(30):
            await self._news.wait()
        self._news.clear()

    async def silent(self) -> bool:
        """Nothing is told by the time that a change elsewhere would have been."""
        before = self.count
        await asyncio.sleep(0.1)
        return before == self.count


class Gated:
    """An Offload that answers while it is `open`."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()

    async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        await self.open.wait()
        return work(*args)


@contextlib.asynccontextmanager
async def telling(*paths: Path, offload: Offload | None = None) -> AsyncIterator[ToldChanges]:
    told = ToldChanges()
    async with Worker("look", 2) as worker, asyncio.TaskGroup() as group:
        task = group.create_task(HostFileWatch(offload or worker).follow(paths, told.changed))
        async with asyncio.timeout(30):
            while told.count < len({path.parent for path in paths}):
                await told.next()
        yield told
        task.cancel()


async def test_a_renewed_config_map_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "POLL", 1e6)
    mounted = MountedMap(tmp_path / "etc")
    mounted.write(config="a: 1")
    async with telling(tmp_path / "etc" / "config.yaml") as told:
        for turn in range(3):
            mounted.write(config=f"a: {turn}")
            await told.next()
            assert f"a: {turn}" == (tmp_path / "etc" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"other": "b: 1"}, {"other": "b: 1", "config": "a: 1"}),
        ({"other": "b: 1", "config": "a: 1"}, {"other": "b: 1"}),
    ],
    ids=["comes", "goes"],
)
async def test_a_key_that_comes_to_a_config_map_or_goes_is_told(tmp_path, before, after):
    mounted = MountedMap(tmp_path / "etc")
    mounted.write(**before)
    async with telling(tmp_path / "etc" / "config.yaml") as told:
        mounted.write(**after)
        await told.next()


def in_place(path: Path) -> None:
    path.write_text("new")


def by_rename(path: Path) -> None:
    (path.parent / ".config.yaml.swp").write_text("new")
    (path.parent / ".config.yaml.swp").rename(path)


def by_link(path: Path) -> None:
    (path.parent / "elsewhere").write_text("new")
    path.unlink()
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("edit", [in_place, by_rename, by_link, Path.unlink])
async def test_every_way_to_edit_is_told_at_once(
    tmp_path, edit: Callable[[Path], None], monkeypatch
):
    monkeypatch.setattr(watch, "POLL", 1e6)
    path = tmp_path / "config.yaml"
    path.write_text("old")
    async with telling(path) as told:
        edit(path)
        await told.next()


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_file_counts_only_once_its_writer_has_closed_it(tmp_path, is_new):
    path = tmp_path / "config.yaml"
    if not is_new:
        path.write_text("old")
    async with telling(path) as told:
        with path.open("w") as file:
            file.write("half")
            file.flush()
            assert await told.silent()
            file.write("whole")
        await told.next()


async def test_a_file_that_is_removed_and_made_anew_is_told_twice(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("old")
    async with telling(path) as told:
        path.unlink()
        await told.next()
        path.write_text("new")
        await told.next()


async def test_a_directory_that_comes_later_is_told_with_what_is_in_it(tmp_path):
    path = tmp_path / "etc" / "config.yaml"
    async with telling(path) as told:
        path.parent.mkdir()
        path.write_text("new")
        await told.next()
        # Made while the directory was not watched yet, it may be seen by the look at once.
        while not path.exists():
            await told.next()
        path.write_text("newer")
        await told.next()


async def test_files_of_several_directories_are_followed(tmp_path):
    paths = [tmp_path / name / "config.yaml" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
    async with telling(*paths) as told:
        for path in paths:
            path.write_text("new")
            await told.next()
            assert await told.silent()


async def test_the_target_of_a_link_elsewhere_is_looked_at_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "POLL", 0.02)
    target = tmp_path / "target.yaml"
    target.write_text("old")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "config.yaml").symlink_to(target)
    async with telling(tmp_path / "etc" / "config.yaml") as told:
        target.write_text("new")
        await told.next()


async def test_a_busy_directory_does_not_put_off_the_look_at_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "POLL", 0.1)
    target = tmp_path / "target.yaml"
    target.write_text("old")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "config.yaml").symlink_to(target)

    async def be_busy() -> None:
        while True:
            (tmp_path / "etc" / "noise").write_text("x")
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        noise = group.create_task(be_busy())
        async with telling(tmp_path / "etc" / "config.yaml") as told:
            target.write_text("new")
            await told.next()
        noise.cancel()


async def test_files_are_looked_at_elsewhere_and_a_silent_disk_is_asked_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(watch, "POLL", 0.02)
    monkeypatch.setattr(watch, "ANSWER", 0.02)
    disk = Gated()
    path = tmp_path / "config.yaml"
    path.write_text("old")
    with structlog.testing.capture_logs() as logs:
        async with telling(path, offload=disk) as told:
            disk.open.clear()
            path.write_text("new")
            assert await told.silent()
            disk.open.set()
            await told.next()

    assert [("watch.silent", str(tmp_path))] == [
        (line["event"], line["directory"]) for line in logs
    ]


async def test_a_disk_that_is_silent_from_the_start_is_followed_once_it_answers(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(watch, "POLL", 0.02)
    monkeypatch.setattr(watch, "ANSWER", 0.02)
    disk = Gated()
    disk.open.clear()
    path = tmp_path / "config.yaml"
    async with telling(path, offload=disk) as told:
        await told.next()
        disk.open.set()
        while not await told.silent():
            pass
        path.write_text("new")
        await told.next()


async def test_a_name_that_cannot_be_looked_at_counts_as_missing(tmp_path):
    async with telling(tmp_path / ("x" * 300)) as told:
        assert await told.silent()


def descriptors() -> int:
    """How many are open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- as cheap as it gets


async def test_leaving_gives_back_every_descriptor(tmp_path):
    gc.collect()  # what other tests have left is closed now, and not between the counts
    before = descriptors()
    for _ in range(3):
        async with telling(tmp_path / "a" / "c.yaml", tmp_path / "b" / "c.yaml"):
            await asyncio.sleep(0)

    assert before == descriptors()


class Late:
    """An Offload whose answers come, but long after whoever asked has gone; it keeps them."""

    def __init__(self) -> None:
        self.works: list[Callable[[], object]] = []
        self.kept: list[object] = []

    def answer(self) -> None:
        """Do all that was asked for so far."""
        self.kept += [work() for work in self.works]
        self.works.clear()

    async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        self.works.append(lambda: work(*args))
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


async def test_a_watch_that_opens_after_its_deadline_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "POLL", 0.02)
    monkeypatch.setattr(watch, "ANSWER", 0.02)
    gc.collect()  # what other tests have left is closed now, and not between the counts
    before = descriptors()
    late = Late()
    async with telling(tmp_path / "c.yaml", offload=late) as told:
        await told.next()
        during = descriptors()
        late.answer()
        assert during == descriptors()

    late.answer()
    assert late.kept
    assert before == descriptors()
