"""Removes container directories that were set aside, in small parts; reports what stays, and room.

Nothing waits for it: new directories are made meanwhile, however much a tenant has left.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NoReturn

import structlog

from agent.core.cluster.changes import NodeEvent
from agent.core.errors import AgentError
from agent.core.ports import HookDirs
from agent.core.reconcile.clearing import Cleared, DiskRoom, kept_event
from agent.kit.cell import Cell, News
from agent.kit.ticks import until_tick

log = structlog.get_logger(__name__)

PERIOD: Final = 3600.0
"""Seconds between attempts to remove what stays."""

RETRY: Final = 60.0
"""Seconds until the next attempt after the disk failed or did not answer."""

ROOM_PERIOD: Final = 60.0
"""Seconds between two looks at the space that is left."""

PAUSE: Final = 0.05
"""Seconds between two parts. A part takes about as long, so others have the disk half the time."""

DEADLINE: Final = 30.0
"""Seconds for one part. A single file can have terabytes."""


class Clearing:
    """Sole writer of `state` and `room`. `set_aside` changes when there is something to remove.

    `say` posts one Event about the Node when directories stay, and no other until none stays.
    """

    def __init__(
        self, hooks: HookDirs, set_aside: Cell[int], say: Callable[[NodeEvent], None]
    ) -> None:
        self._hooks = hooks
        self._set_aside = set_aside
        self._say = say
        self.state: Cell[Cleared] = Cell(Cleared())
        self.room: Cell[DiskRoom] = Cell(DiskRoom())

    async def run(self) -> NoReturn:
        """Clear at the start, when something was set aside, and each PERIOD."""
        loop = asyncio.get_running_loop()
        news = News(self._set_aside)
        due = loop.time()
        while True:
            again = loop.time() >= due
            done = await self._clear(again=again)
            if again:
                due = loop.time() + (PERIOD if done else RETRY)
            elif not done:
                due = min(due, loop.time() + RETRY)
            await news.wait(max(due - loop.time(), 0.0))

    async def follow_room(self) -> NoReturn:
        """Set `room` each ROOM_PERIOD; not known while the disk fails or does not answer."""
        while True:
            room = DiskRoom()
            try:
                async with asyncio.timeout(DEADLINE):
                    room = await self._hooks.room()
            except (AgentError, TimeoutError) as error:
                log.warning("hooks.not_measured", err=str(error) or "out of time")
            self.room.set(room)
            await asyncio.sleep(until_tick(ROOM_PERIOD))

    async def _clear(self, *, again: bool) -> bool:
        """Remove all that can be removed. False: the disk failed."""
        while True:
            try:
                async with asyncio.timeout(DEADLINE):
                    cleared = await self._hooks.clear(again=again)
            except (AgentError, TimeoutError) as error:
                log.warning("hooks.not_cleared", err=str(error) or "out of time")
                return False
            again = False
            self._publish(cleared)
            if not cleared.more:
                return True
            await asyncio.sleep(PAUSE)

    def _publish(self, cleared: Cleared) -> None:
        """Set the state. During an attempt, what stayed before still counts."""
        before = self.state.value
        if cleared.more and cleared.kept <= before.kept:
            return
        if cleared.kept and not before.kept:
            log.warning("hooks.kept", directories=cleared.kept, err=cleared.why)
            self._say(kept_event(cleared))
        self.state.set(cleared)
