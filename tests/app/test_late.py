"""What runs before the rest is loaded waits for it, and nothing is lost meanwhile."""

import asyncio
import datetime as dt

import pytest

from agent.app.late import LateAllocator
from agent.app.running import alive
from agent.core.allocation.steps import DISK_BUDGET
from agent.core.containers.edits import ContainerEdits
from agent.core.errors import Refusal, RefusalReason
from agent.core.inventory.slices import SliceId
from agent.host.systemd import Systemd

IDS = (SliceId("GPU-1-0"),)
EDITS = ContainerEdits(envs=(("A", "b"),))


class Answers:
    """An allocator that has one answer."""

    async def allocate(self, ids: tuple[SliceId, ...]) -> ContainerEdits:
        assert ids == IDS
        return EDITS

    async def prefer(
        self,
        available: tuple[SliceId, ...],
        must_include: tuple[SliceId, ...],
        size: int,
    ) -> tuple[SliceId, ...]:
        assert must_include == ()
        return available[:size]


class Watchdog(Systemd):
    """Counts signs of life; systemd wants one in 30 s."""

    def __init__(self) -> None:
        super().__init__(watchdog=dt.timedelta(seconds=30))
        self.beats: list[float] = []

    def alive(self) -> None:
        self.beats.append(asyncio.get_running_loop().time())


async def test_a_call_that_comes_early_is_answered_once_the_rest_is_loaded() -> None:
    late = LateAllocator()
    async with asyncio.TaskGroup() as group:
        call = group.create_task(late.allocate(IDS))
        await asyncio.sleep(1)
        assert not call.done()
        late.ready.set(Answers())

    assert call.result() == EDITS


async def test_an_agent_that_is_never_loaded_holds_up_the_kubelet_for_ten_seconds() -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(Refusal, match="still starting after 10 s; create the pod again") as refused:
        await LateAllocator().allocate(IDS)

    assert DISK_BUDGET == pytest.approx(asyncio.get_running_loop().time() - began)
    assert RefusalReason.OUT_OF_TIME is refused.value.gate


async def test_a_preference_is_passed_on() -> None:
    late = LateAllocator()
    late.ready.set(Answers())

    assert await late.prefer((*IDS, SliceId("GPU-1-1")), (), 1) == IDS


async def test_the_watchdog_hears_from_whoever_waits() -> None:
    """A standby waits for hours, and a slow driver for seconds: both are alive."""
    notifier = Watchdog()
    start = asyncio.get_running_loop().time()
    async with alive(notifier):
        await asyncio.sleep(35)

    assert [beat - start for beat in notifier.beats] == [0, 10, 20, 30]


async def test_without_a_watchdog_nobody_beats() -> None:
    async with alive(Systemd()):
        await asyncio.sleep(100)


async def test_it_tells_when_the_kubelet_is_in_the_middle_of_a_call() -> None:
    late = LateAllocator()
    began = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        group.create_task(late.allocate(IDS))
        group.create_task(late.prefer(IDS, (), 1))
        quiet = group.create_task(late.calls.come(0.5))
        await asyncio.sleep(8)
        assert not quiet.done()
        late.ready.set(Answers())

    assert 8.5 == asyncio.get_running_loop().time() - began
