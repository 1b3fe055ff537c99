"""Removes what was set aside of containers' directories, part by part, and tells what stays.

Nothing waits for it: however much a tenant has left, others' directories are made beside it.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NoReturn

import structlog

from agent.core.cluster.changes import NodeEvent
from agent.core.errors import AgentError
from agent.core.ports import HookDirs
from agent.core.reconcile.clearing import Cleared, kept_event
from agent.kit.cell import Cell
from agent.kit.news import News

log = structlog.get_logger(__name__)

PERIOD: Final = 3600.0
"""Seconds after which what stays is tried again."""

RETRY: Final = 60.0
"""Seconds after which a disk that failed, or did not answer, is asked again."""

PAUSE: Final = 0.05
"""Seconds between two parts, which take about as long: half of the time is the disk's others'."""

DEADLINE: Final = 30.0
"""Seconds for one part: a single file can be of terabytes."""


class Clearing:
    """Sole writer of `state`. `set_aside` changes when there is something to do.

    `say` posts an Event about the Node, once for what stays until nothing does.
    """

    def __init__(
        self, hooks: HookDirs, set_aside: Cell[int], say: Callable[[NodeEvent], None]
    ) -> None:
        self._hooks = hooks
        self._set_aside = set_aside
        self._say = say
        self.state: Cell[Cleared] = Cell(Cleared())

    async def run(self) -> NoReturn:
        """Clear at the start, when something was set aside, and now and then."""
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

    async def _clear(self, *, again: bool) -> bool:
        """Part after part until nothing is left that can go; False: the disk failed."""
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
        """While it is tried again, what stayed before counts as staying."""
        before = self.state.value
        if cleared.more and cleared.kept <= before.kept:
            return
        if cleared.kept and not before.kept:
            log.warning("hooks.kept", directories=cleared.kept, err=cleared.why)
            self._say(kept_event(cleared))
        self.state.set(cleared)
