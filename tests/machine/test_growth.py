"""Pods come and go for hours and days, and the agent holds no more than before."""

import asyncio

import pytest

from tests.machine.live import live_objects
from tests.machine.one_node import play
from tests.machine.playing import silence
from tests.machine.pods import Shape
from tests.machine.world import MachineWorld

EVERY = 3.0
"""Seconds from one pod to the next: 1,200 in an hour."""
LONG = 600.0
"""Seconds after which whatever was begun is over and forgotten."""
FEW = 64
"""Objects that one moment has more than another: timers, counts of the last round."""


async def churn(world: MachineWorld, first: int, count: int) -> None:
    """So many pods, each of which works for 2 s and is deleted when it has succeeded."""
    for number in range(first, first + count):
        world.create_and_schedule(f"p{number}", Shape(seconds=2))
        await asyncio.sleep(EVERY)
        for pod in world.pods():
            if pod["status"].get("phase") == "Succeeded":
                world.delete(pod, 0)
    await asyncio.sleep(LONG)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1200, marks=[pytest.mark.slow, pytest.mark.timeout(300)], id="two hours"),
        pytest.param(50_000, marks=[pytest.mark.histories, pytest.mark.timeout(7200)], id="days"),
    ],
)
def test_as_many_pods_again_leave_no_object_more(count: int) -> None:
    async def history(world: MachineWorld) -> None:
        await churn(world, 0, count)
        once = live_objects(world.agent)
        await churn(world, count, count)
        twice = live_objects(world.agent)
        assert twice.total() <= once.total() + FEW, twice - once

    with silence():
        play(history)
