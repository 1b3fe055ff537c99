"""READY waits for the kubelet, not for ever; who cannot write in its directory gives up."""

import asyncio
import datetime as dt
from pathlib import Path

import pytest

from agent.app.main import MEETING, alive, lost, met
from agent.errors import DirectoryLost
from agent.host.process import Systemd
from agent.kit.cell import Cell
from agent.kubelet.register import RegistrationState


def elapsed(began: float) -> float:
    return asyncio.get_running_loop().time() - began


async def test_ready_waits_for_the_first_word_about_the_kubelet_but_not_for_ever():
    state, loop = Cell(RegistrationState()), asyncio.get_running_loop()
    began = loop.time()
    await met(state)
    assert MEETING == pytest.approx(elapsed(began))
    loop.call_later(1, state.set, RegistrationState(text="its socket is not there"))
    began = loop.time()
    await met(state)
    assert 1 == pytest.approx(elapsed(began))


PLUGINS = Path("/var/lib/kubelet/device-plugins")


async def test_a_directory_that_was_lost_ends_the_process_and_is_named():
    state, loop = Cell(RegistrationState()), asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await lost(state, PLUGINS, lambda: False)
    with pytest.raises(DirectoryLost, match=r"^/var/lib/kubelet/device-plugins was created again"):
        await lost(state, PLUGINS, iter([False, False, True]).__next__)
    began = loop.time()
    loop.call_later(1, state.set, RegistrationState(text="no socket serves"))
    with pytest.raises(DirectoryLost):
        await lost(state, PLUGINS, iter([False, True]).__next__)
    assert 1 == pytest.approx(elapsed(began))  # bad news is a reason to look at once


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
    async with alive(notifier):
        await asyncio.sleep(35)

    assert [beat - start for beat in notifier.beats] == [0, 10, 20, 30]


async def test_without_a_watchdog_nobody_beats() -> None:
    async with alive(Systemd()):
        await asyncio.sleep(100)
