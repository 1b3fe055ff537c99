"""When the settings are read again: on demand at once, and when their files changed and lie still.

What they say, and whether they are taken over, is not decided here.
"""

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn, Protocol

from agent.core.ports import FileWatch

STILL = 0.2
"""Seconds without a change after which files count as written."""

RESTLESS = 2.0
"""Seconds after which files are read although they change again and again."""

READ_DEADLINE = 30.0
"""Seconds for one reading: a file system that hangs is tried again by the supervisor."""


class Read(Protocol):
    """Reads all sources and returns the files to watch; `asked`: somebody wants it now."""

    async def __call__(self, *, asked: bool) -> Collection[Path]:
        """Read them. Raises what the supervisor is to see."""
        ...


class Reload:
    """Follows the files `paths`, then the ones that `read` names. `asked` is set on demand."""

    def __init__(
        self, watch: FileWatch, paths: Collection[Path], read: Read, asked: asyncio.Event
    ) -> None:
        self._watch = watch
        self._paths = frozenset(paths)
        self._read = read
        self._asked = asked
        self._news = asyncio.Event()
        self._is_asked = False

    async def run(self) -> NoReturn:
        """Follow them for ever; they are read once as soon as they are watched.

        Raises TimeoutError, in a group: a file system does not answer.
        """
        while True:
            paths = self._paths
            async with asyncio.TaskGroup() as group:
                tasks = (
                    group.create_task(self._watch.follow(paths, self._news.set)),
                    group.create_task(self._listen()),
                )
                while self._paths == paths:
                    await self._news.wait()
                    await self._settle()
                    await self._look()
                for task in tasks:
                    task.cancel()

    async def _listen(self) -> NoReturn:
        while True:
            await self._asked.wait()
            self._asked.clear()
            self._is_asked = True
            self._news.set()

    async def _settle(self) -> None:
        """Return once nothing has changed for a moment, at once if somebody asks."""
        loop = asyncio.get_running_loop()
        end = loop.time() + RESTLESS
        while not self._is_asked and loop.time() < end:
            self._news.clear()
            try:
                async with asyncio.timeout(STILL):
                    await self._news.wait()
            except TimeoutError:
                return

    async def _look(self) -> None:
        is_asked, self._is_asked = self._is_asked, False
        self._news.clear()
        async with asyncio.timeout(READ_DEADLINE):
            self._paths = frozenset(await self._read(asked=is_asked))
