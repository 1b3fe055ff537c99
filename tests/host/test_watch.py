"""KubeletDirectory on real inotify: sockets come, go and are made anew, and so is the directory."""

import contextlib
import os
import shutil

import pytest
from asyncinotify import Inotify

from agent.kubelet import register as watch
from agent.kubelet.register import KubeletDirectory

pytestmark = pytest.mark.looptime(False)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "device-plugins").mkdir()
    return tmp_path / "device-plugins"


@pytest.fixture
def poll():
    """Seconds between two looks: only events count while there is a directory."""
    return 1e6


@pytest.fixture
def is_there():
    """Whether the directory is there at the first look."""
    return True


@pytest.fixture
async def changes(directory, monkeypatch, poll, is_there):
    """Changes as they come, the first look already taken."""
    if not is_there:
        directory.rmdir()
    monkeypatch.setattr(watch, "POLL", poll)
    monkeypatch.setattr(watch, "AGAIN", 0.02)
    async with contextlib.aclosing(KubeletDirectory(directory).changes()) as changes:
        assert "" == await anext(changes)
        yield changes


async def take(changes, count):
    return [await anext(changes) for _ in range(count)]


def touch(path):
    path.write_bytes(b"")


async def test_a_socket_made_anew_at_once_is_seen(directory, changes):
    for _ in range(2):
        touch(directory / "kubelet.sock")
        assert ["kubelet.sock"] == await take(changes, 1)
        (directory / "kubelet.sock").unlink()


@pytest.mark.parametrize(
    ("how", "is_there"),
    [("comes", False), ("moves", True), ("removed", True), ("removed with its parent", True)],
)
async def test_a_directory_that_comes_later_or_anew_is_watched_from_then_on(
    directory, changes, how
):
    if how == "moves":
        directory.rename(directory.parent / "old")
    if how == "removed":
        directory.rmdir()
    if how == "removed with its parent":
        shutil.rmtree(directory.parent)
    assert "" == await anext(changes)
    directory.mkdir(parents=True)
    assert "" == await anext(changes)
    touch(directory / "kubelet.sock")

    while "kubelet.sock" != await anext(changes):
        assert (directory / "kubelet.sock").exists()


@pytest.mark.parametrize("poll", [0.02])
async def test_events_still_come_when_others_have_taken_all_that_can_be_opened(
    directory, changes, monkeypatch
):
    monkeypatch.setattr(watch, "Inotify", lambda **_: os.open("", os.O_RDONLY))
    assert ["", ""] == await take(changes, 2)
    touch(directory / "kubelet.sock")

    assert "kubelet.sock" in await take(changes, 2)


@pytest.mark.parametrize("poll", [0.02])
async def test_without_inotify_everything_may_have_changed(directory, monkeypatch, poll):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watch, "POLL", poll)
    monkeypatch.setattr(watch, "AGAIN", poll)
    monkeypatch.setattr(Inotify, "add_watch", refuse)
    async with contextlib.aclosing(KubeletDirectory(directory).changes()) as changes:
        assert [""] * 4 == await take(changes, 4)


async def test_an_overflow_asks_to_look_at_everything_and_each_name_is_told_once(
    directory, changes
):
    with open("/proc/sys/fs/inotify/max_queued_events") as file:  # noqa: ASYNC230, PTH123 -- /proc
        limit = int(file.read())
    for _ in range(limit // 2 + 8):
        touch(directory / "noise")
        (directory / "noise").unlink()

    assert ["noise", ""] == await take(changes, 2)


def test_the_epoch_changes_with_the_socket(directory):
    watched = KubeletDirectory(directory)
    assert None is watched.now()
    touch(directory / "kubelet.sock")
    first = watched.now()
    assert first == watched.now()
    (directory / "kubelet.sock").unlink()
    touch(directory / "kubelet.sock")
    os.utime(directory / "kubelet.sock")

    assert None is not first
    assert first != watched.now()
    assert watched.read("kubelet.sock")
    assert not watched.read("ours.sock")
