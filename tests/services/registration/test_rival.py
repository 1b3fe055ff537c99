"""Another plugin for our resource that comes and goes: told once, and the registration renewed."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from agent.kit.cell import Cell
from agent.kubelet.register import LOOK_AGAIN, SETTLE, Rivals

SOON = 2 * SETTLE
LATER = LOOK_AGAIN + SOON


class Side:
    """Plays the other plugin's socket and our registration."""

    path = "/d/nvidia-gpu.sock"
    names = ("nvidia-gpu.sock",)

    def __init__(self, *, answers: bool | None = None) -> None:
        self.resource = Cell("nvidia.com/gpu")
        self.is_answering = answers
        self.registration_id: int | None = 0
        self.renewed = 0
        self.said: list[str] = []
        self.heard: Callable[[str], None] = lambda _: None

    def answers(self) -> bool | None:
        return self.is_answering

    def renew(self) -> None:
        self.renewed += 1
        self.registration_id = self.renewed

    def becomes(self, answers: bool | None) -> None:  # noqa: FBT001 -- as `answers()` says it
        self.is_answering = answers
        self.heard("nvidia-gpu.sock")

    async def comes_and_is_looked_at(self) -> None:
        self.becomes(True)
        await asyncio.sleep(SOON)


@contextlib.asynccontextmanager
async def watched(side: Side):
    rivals = Rivals(side, side, lambda event: side.said.append(event.reason))  # type: ignore[arg-type]
    side.heard = rivals.heard
    async with asyncio.TaskGroup() as group:
        running = group.create_task(rivals.run())
        await asyncio.sleep(SOON)
        yield
        running.cancel()


async def test_it_is_told_once_when_it_comes():
    side = Side()
    async with watched(side):
        await side.comes_and_is_looked_at()
        await asyncio.sleep(60)

    assert ["PluginConflict"] == side.said
    assert 0 == side.renewed


async def test_when_it_is_gone_the_registration_is_renewed_once():
    side = Side()
    async with watched(side):
        await side.comes_and_is_looked_at()
        side.becomes(None)
        await asyncio.sleep(SOON)
        assert 1 == side.renewed
        await asyncio.sleep(60)

    assert 1 == side.renewed


async def test_one_that_is_killed_is_missed_soon_although_its_socket_stays():
    side = Side()
    async with watched(side):
        await side.comes_and_is_looked_at()
        side.is_answering = False
        await asyncio.sleep(LATER)

    assert 1 == side.renewed


async def test_one_that_came_and_went_between_two_looks_counts():
    side = Side()
    async with watched(side):
        side.becomes(True)
        side.becomes(None)
        await asyncio.sleep(SOON)

    assert 1 == side.renewed
    assert [] == side.said


async def test_a_stream_that_ended_with_it_is_renewed_already():
    side = Side(answers=True)
    async with watched(side):
        side.becomes(None)
        side.registration_id = None
        await asyncio.sleep(LATER)

    assert 0 == side.renewed
    assert [] == side.said


async def test_a_dead_socket_that_is_removed_disturbs_nobody():
    side = Side(answers=False)
    async with watched(side):
        side.becomes(None)
        await asyncio.sleep(LATER)

    assert 0 == side.renewed


@pytest.mark.parametrize("spell", [None, 1], ids=["waits", "registered again"])
async def test_a_kubelet_that_starts_and_sweeps_the_socket_of_a_living_one_is_no_end(spell):
    side = Side(answers=True)
    async with watched(side):
        side.registration_id = None  # the kubelet stops
        await asyncio.sleep(LATER)
        side.becomes(None)
        side.registration_id = spell
        await asyncio.sleep(SOON)
        assert 0 == side.renewed
        side.becomes(True)
        await asyncio.sleep(LATER)

    assert 0 == side.renewed


async def test_one_that_goes_after_the_kubelets_start_is_missed():
    side = Side(answers=True)
    async with watched(side):
        side.registration_id = 7
        await asyncio.sleep(LATER)
        side.becomes(None)
        await asyncio.sleep(SOON)

    assert 1 == side.renewed
