"""Plays a history on a node of its own, with nothing random, on virtual time."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

from tests.machine.agent_life import start_agent
from tests.machine.sides import VirtualClock, VirtualLoop
from tests.machine.world import MachineWorld

Happening = Callable[[MachineWorld], Coroutine[object, object, None]]


def play(history: Happening) -> None:
    """The history from when the node is ready on. It breaches no invariant."""
    loop = VirtualLoop()

    async def whole() -> None:
        world, ready = MachineWorld(1, VirtualClock(loop), start_agent), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(world.run(ready))
            await ready.wait()
            await history(world)
            assert [] == [*world.audit.breaches]
            task.cancel()

    with contextlib.closing(loop):
        loop.run_until_complete(whole())
        loop.run_until_complete(loop.shutdown_asyncgens())
