"""READY waits for the kubelet, not for ever; who cannot write in its directory gives up."""

import asyncio
import datetime as dt
from pathlib import Path

import pytest

from agent.app.back import MEETING, alive, lost, met
from agent.app.front import Allocator
from agent.errors import DirectoryLost
from agent.host.process import Systemd
from agent.kit.cell import Cell
from agent.kubelet.register import RegistrationState


async def met_after(state):
    began = asyncio.get_running_loop().time()
    await met(state)
    return asyncio.get_running_loop().time() - began


async def test_ready_waits_for_the_first_word_about_the_kubelet():
    state = Cell(RegistrationState())
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(met_after(state))
        await asyncio.sleep(1)
        assert not waiting.done()
        state.set(RegistrationState(text="waiting for the kubelet: its socket is not there"))

    assert 1 == pytest.approx(waiting.result())


async def test_ready_waits_no_longer_than_the_meeting_may_last():
    assert MEETING == pytest.approx(await met_after(Cell(RegistrationState())))


PLUGINS = Path("/var/lib/kubelet/device-plugins")


async def test_a_directory_that_was_lost_ends_the_process_and_is_named():
    with pytest.raises(DirectoryLost, match=r"^/var/lib/kubelet/device-plugins was created again"):
        await lost(Cell(RegistrationState()), PLUGINS, iter([False, False, True]).__next__)


async def test_bad_news_of_the_registration_is_a_reason_to_look_at_once():
    state = Cell(RegistrationState())
    loop = asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(1, state.set, RegistrationState(text="no socket serves"))

    with pytest.raises(DirectoryLost):
        await lost(state, PLUGINS, iter([False, True]).__next__)

    assert 1 == pytest.approx(loop.time() - began)


async def test_a_directory_that_stays_is_no_reason_to_end():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await lost(Cell(RegistrationState()), PLUGINS, lambda: False)


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


class SlowAllocator:
    """An allocator whose answer takes 8 s."""

    async def allocate(self, ids):
        await asyncio.sleep(8)
        return ids

    async def prefer(self, available, must_include, size):
        return available[:size]


async def test_what_would_disturb_a_call_of_the_kubelet_waits_until_it_is_over():
    allocator = Allocator()
    allocator.answers = SlowAllocator()
    began = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        group.create_task(allocator.allocate(()))
        group.create_task(allocator.prefer((), (), 1))
        await asyncio.sleep(0)
        await allocator.calls.come(0.5)

    assert 8.5 == asyncio.get_running_loop().time() - began
