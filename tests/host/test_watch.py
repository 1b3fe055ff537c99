"""DirectoryWatch on real inotify: sockets come, go and are made anew, and so is the directory."""

import contextlib
import os
import shutil

import pytest
import structlog
from asyncinotify import Inotify

from agent.errors import KubeletError
from agent.host import files as watch
from agent.host.files import DirectoryWatch

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
