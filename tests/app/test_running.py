"""READY waits for the kubelet, not for ever; who cannot write in its directory gives up."""

import asyncio
import datetime as dt
from pathlib import Path

import pytest

from agent.app.main import ANSWER_DEADLINE, kubelet_answered, watch_mounts, watchdog_pinged
from agent.errors import DirectoryLost
from agent.host.process import Systemd
from agent.kit.cell import Cell
from agent.kubelet.register import RegistrationState


def elapsed(began: float) -> float:
    return asyncio.get_running_loop().time() - began


async def test_ready_waits_for_the_first_word_about_the_kubelet_but_not_for_ever():
    state, loop = Cell(RegistrationState()), asyncio.get_running_loop()
    began = loop.time()
    await kubelet_answered(state)
    assert ANSWER_DEADLINE == pytest.approx(elapsed(began))
    loop.call_later(1, state.set, RegistrationState(text="its socket is not there"))
    began = loop.time()
    await kubelet_answered(state)
    assert 1 == pytest.approx(elapsed(began))


class Mounts:
    """Through which the kubelet's directory is seen writable or read-only."""

    def __init__(self, root: Path) -> None:
        self.path = root / "device-plugins"
        self.read_only = False

    def look(self, directory: Path) -> bool:
        directory.stat()
        return self.read_only

    def change(self, how: str) -> None:
        if how in {"make", "remove"}:
            self.path.mkdir() if how == "make" else self.path.rmdir()
        self.read_only = how == "close" or (how != "open" and self.read_only)


@pytest.mark.parametrize(
    ("changes", "is_lost"),
    [
        pytest.param("make remove make", False, id="made anew"),
        pytest.param("make remove close make", True, id="made anew, and read-only"),
        pytest.param("make close", False, id="its file system turned read-only"),
        pytest.param("close make remove make", False, id="never writable"),
        pytest.param("close open make remove make close", True, id="missing at first"),
        pytest.param("close make open remove make close", True, id="read-only at first"),
    ],
)
async def test_only_a_written_directory_that_was_removed_and_is_read_only_is_lost(
    tmp_path, changes, is_lost
):
    mounts, loop = Mounts(tmp_path), asyncio.get_running_loop()
    began, (first, *later) = loop.time(), changes.split()
    mounts.change(first)
    for minutes, change in enumerate(later, 1):
        loop.call_later(60 * minutes, mounts.change, change)
    end = pytest.raises(DirectoryLost, match=f"^{mounts.path} was created again")
    with end if is_lost else pytest.raises(TimeoutError):
        async with asyncio.timeout(60 * len(later) + 30):
            await watch_mounts(Cell(RegistrationState()), mounts.path, mounts.look)

    assert elapsed(began) >= 60 * len(later)


async def test_bad_news_of_the_registration_is_a_reason_to_look_at_once(tmp_path):
    mounts, state, loop = Mounts(tmp_path), Cell(RegistrationState()), asyncio.get_running_loop()
    began = loop.time()
    mounts.change("make")
    for change in ("remove", "close", "make"):
        loop.call_later(1, mounts.change, change)
    loop.call_later(1, state.set, RegistrationState(text="no socket serves"))
    with pytest.raises(DirectoryLost):
        await watch_mounts(state, mounts.path, mounts.look)

    assert 1 == pytest.approx(elapsed(began))


class BeatenWatchdog(Systemd):
    """Counts signs of life; systemd wants one in 30 s."""

    def __init__(self) -> None:
        super().__init__(watchdog=dt.timedelta(seconds=30))
        self.beats: list[float] = []

    def alive(self) -> None:
        self.beats.append(asyncio.get_running_loop().time())


async def test_the_watchdog_hears_from_whoever_waits() -> None:
    """A standby waits for hours, and a slow driver for seconds: both are alive."""
    notifier = BeatenWatchdog()
    start = asyncio.get_running_loop().time()
    async with watchdog_pinged(notifier):
        await asyncio.sleep(35)

    assert [beat - start for beat in notifier.beats] == [0, 10, 20, 30]


async def test_without_a_watchdog_nobody_beats() -> None:
    async with watchdog_pinged(Systemd()):
        await asyncio.sleep(100)
