"""Another plugin for our resource that comes and goes: told once, and the registration renewed."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from agent.kit.cell import Cell
from agent.kubelet.register import LOOK_AGAIN, SETTLE, Rivals
from tests.services.at_work import at_work

SOON = 2 * SETTLE
LATER = LOOK_AGAIN + SOON
CONFLICT = ["PluginConflict"]


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

    def stops(self) -> None:
        """Our registration is over, as when the kubelet stops."""
        self.registration_id = None

    def registers(self) -> None:
        self.registration_id = 7


@contextlib.asynccontextmanager
async def watched(side: Side):
    rivals = Rivals(side, side, lambda event: side.said.append(event.reason))  # type: ignore[arg-type]
    side.heard = rivals.heard
    async with at_work(rivals.run):
        await asyncio.sleep(SOON)
        yield


def comes(side: Side) -> None:
    side.becomes(True)


def goes(side: Side) -> None:
    side.becomes(None)


def is_killed(side: Side) -> None:
    """Its socket stays, and nobody is told."""
    side.is_answering = False


@pytest.mark.parametrize(
    ("answers", "steps", "renewed", "said"),
    [
        (None, [comes, SOON, 60], 0, CONFLICT),
        (None, [comes, SOON, goes, SOON], 1, CONFLICT),
        (None, [comes, SOON, goes, SOON, 60], 1, CONFLICT),
        (None, [comes, SOON, is_killed, LATER], 1, CONFLICT),
        (None, [comes, goes, SOON], 1, []),
        (True, [goes, Side.stops, LATER], 0, []),
        (False, [goes, LATER], 0, []),
        (True, [Side.stops, LATER, goes, SOON], 0, []),
        (True, [Side.stops, LATER, goes, SOON, comes, LATER], 0, CONFLICT),
        (True, [Side.stops, LATER, goes, Side.registers, SOON], 0, []),
        (True, [Side.stops, LATER, goes, Side.registers, SOON, comes, LATER], 0, CONFLICT),
        (True, [Side.registers, LATER, goes, SOON], 1, []),
    ],
    ids=[
        "it is told once when it comes",
        "when it is gone the registration is renewed",
        "and only once",
        "one that is killed is missed soon although its socket stays",
        "one that came and went between two looks counts",
        "a stream that ended with it is renewed already",
        "a dead socket that is removed disturbs nobody",
        "a starting kubelet sweeps the socket of a living one",
        "which makes it anew",
        "a kubelet that knows us again swept it",
        "and that one makes it anew",
        "one that goes after the kubelet's start is missed",
    ],
)
async def test_another_plugin_is_told_once_and_missed_when_it_goes(answers, steps, renewed, said):
    side = Side(answers=answers)
    async with watched(side):
        for step in steps:
            if callable(step):
                step(side)
            else:
                await asyncio.sleep(step)

    assert (renewed, said) == (side.renewed, side.said)
