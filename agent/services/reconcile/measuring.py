"""Measures the container directories and reports large ones.

A container can fill the file system that all of them share. The agent does not prevent that.
Directories are measured in small parts, so that nothing waits for it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn, TypeVar

import msgspec
import structlog

from agent.core.cluster.changes import NodeEvent
from agent.core.errors import AgentError
from agent.core.ports import HookDirs
from agent.core.reconcile.measuring import (
    DirectorySize,
    DiskRoom,
    Measured,
    OwnedDirectory,
    large_event,
    owned_directories,
)
from agent.core.state.ledger import Ledger
from agent.kit.cell import Cell
from agent.kit.ticks import until_tick

log = structlog.get_logger(__name__)

T = TypeVar("T")

PERIOD: Final = 60.0
"""Seconds between two measurements of all directories."""

PAUSE: Final = 0.05
"""Seconds between two parts of a measurement. A part takes about as long."""

DEADLINE: Final = 30.0
"""Seconds for one part. The disk may be removing a file of terabytes at the same time."""


class Measuring:
    """Sole writer of `state`. `say` posts one Event for each directory that becomes large."""

    def __init__(
        self, hooks: HookDirs, ledger: Cell[Ledger], say: Callable[[NodeEvent], None]
    ) -> None:
        self._hooks = hooks
        self._ledger = ledger
        self._say = say
        self.state: Cell[Measured] = Cell(Measured())

    async def run(self) -> NoReturn:
        """Measure all directories each PERIOD, for ever."""
        while True:
            try:
                await self._measure()
            except TimeoutError:
                # The other directories are on the same disk and would time out too.
                log.warning("hooks.not_measured", err="out of time")
            await asyncio.sleep(until_tick(PERIOD))

    async def _measure(self) -> None:
        """Measure all directories once, one after the other. Raises TimeoutError."""
        owned = tuple(owned_directories(self._ledger.value))
        self._set_large(self.state.value.large & {directory.name for directory in owned})
        failures, room = list[str](), DiskRoom()
        try:
            room = await _in_time(self._hooks.room())
        except AgentError as error:
            failures.append(str(error))
        finally:
            self.state.set(msgspec.structs.replace(self.state.value, room=room))
        for directory in owned:
            try:
                self._judge(directory, await self._size(directory.name))
            except AgentError as error:
                failures.append(str(error))
        if failures:
            log.warning("hooks.not_measured", failures=len(failures), err=failures[0])

    async def _size(self, name: str) -> DirectorySize:
        size = await _in_time(self._hooks.measure(name, anew=True))
        while size.more:
            await asyncio.sleep(PAUSE)
            size = await _in_time(self._hooks.measure(name, anew=False))
        return size

    def _judge(self, owned: OwnedDirectory, size: DirectorySize) -> None:
        large = self.state.value.large
        if not size.is_large:
            self._set_large(large - {owned.name})
        elif owned.name not in large:
            log.warning(
                "hooks.large",
                ns=owned.namespace,
                pod=owned.pod,
                container=owned.container,
                directory=owned.name,
                bytes=size.allocated,
                entries=size.entries,
                closed=size.closed,
            )
            self._say(large_event(owned, size))
            self._set_large(large | {owned.name})

    def _set_large(self, large: frozenset[str]) -> None:
        self.state.set(msgspec.structs.replace(self.state.value, large=large))


async def _in_time(part: Awaitable[T]) -> T:
    """Await one part for at most DEADLINE. Raises TimeoutError, and the errors of the part."""
    async with asyncio.timeout(DEADLINE):
        return await part
