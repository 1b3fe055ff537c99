"""READY waits for the kubelet, not for ever; who cannot write in its directory gives up."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from agent.app.main import ANSWER_DEADLINE, ping_watchdog, tell_systemd, watch_mounts
from agent.errors import DirectoryLost
from agent.host.system import Systemd
from agent.kit.cell import Cell
from agent.kubelet.register import RegistrationState
from tests.app.front_node import joined
from tests.fakes.driver import ScriptedDriver


def elapsed(began: float) -> float:
    return asyncio.get_running_loop().time() - began


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


class HeardSystemd(Systemd):
    """What systemd hears, and when; it wants a sign of life in 30 s."""

    def __init__(self, watchdog: float = 30.0) -> None:
        super().__init__({})
        self.watchdog = watchdog
        self.heard: list[tuple[float, str]] = []

    def tell(self, message: str) -> None:
        self.heard.append((asyncio.get_running_loop().time(), message))


async def test_the_watchdog_hears_every_10_s_and_without_one_the_pings_end() -> None:
    notifier = HeardSystemd()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(35):
            await ping_watchdog(notifier)
    await ping_watchdog(HeardSystemd(0))

    assert [(second, "WATCHDOG=1") for second in (0, 10, 20, 30)] == notifier.heard


async def test_ready_waits_for_the_first_word_about_the_kubelet_but_not_for_ever() -> None:
    for later, expected in ((1.0, 1.0), (60.0, ANSWER_DEADLINE)):
        front, notifier, loop = (
            joined(ScriptedDriver(())),
            HeardSystemd(),
            asyncio.get_running_loop(),
        )
        state, began = front.registration.state, loop.time()
        loop.call_later(later, state.set, RegistrationState(text="its socket is not there"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(61):
                await tell_systemd(notifier, front)

        told = [(round(at - began, 3), message) for at, message in notifier.heard]
        assert (expected, "READY=1") == told[0]
        assert "STATUS=0 slices on offer; its socket is not there" == told[-1][1]
