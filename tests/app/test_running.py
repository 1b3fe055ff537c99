"""READY waits for the kubelet, not for ever; who cannot write in its directory gives up."""

import asyncio
from pathlib import Path

import pytest

from agent.app.running import MEETING, lost, met
from agent.core.errors import DirectoryLost
from agent.kit.cell import Cell
from agent.plugin.registration import RegistrationState


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


class Seen:
    """What a look at the directory says, each time; the last word stays."""

    def __init__(self, *lost: bool) -> None:
        self.path = Path("/var/lib/kubelet/device-plugins")
        self.left = list(lost)

    def is_lost(self) -> bool:
        return self.left.pop(0) if self.left[1:] else self.left[0]


async def test_a_directory_that_was_lost_ends_the_process_and_is_named():
    with pytest.raises(DirectoryLost, match=r"^/var/lib/kubelet/device-plugins was created again"):
        await lost(Cell(RegistrationState()), Seen(False, False, True))


async def test_bad_news_of_the_registration_is_a_reason_to_look_at_once():
    state = Cell(RegistrationState())
    loop = asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(1, state.set, RegistrationState(text="no socket serves"))

    with pytest.raises(DirectoryLost):
        await lost(state, Seen(False, True))

    assert 1 == pytest.approx(loop.time() - began)


async def test_a_directory_that_stays_is_no_reason_to_end():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await lost(Cell(RegistrationState()), Seen(False))
