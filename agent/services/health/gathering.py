"""Reports that wait to be judged together: one mishap makes many."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from agent.core.health.reports import DriverEvent, EventKind, Probe
from agent.core.health.settings import HealthSettings, xid_class
from agent.core.health.xids import XidClass
from agent.core.inventory.gpu import GpuUuid

MOST_STRANGE: Final = 1024
"""When so many reports wait, those of GPUs that nobody knows are passed over."""

_Sort = tuple[EventKind, GpuUuid | None, XidClass | None]
"""Of events that differ in nothing else, the first one decides: the others are its echo."""


class Gathering:
    """An event waits `gather` seconds for others of its mishap, a probe `coalesce` for its round.

    Of each sort of events about a GPU the first one is kept, so that they are bounded by the
    number of GPUs, and no storm pushes a graver one out.
    """

    def __init__(self, settings: HealthSettings, knows: Callable[[GpuUuid], bool]) -> None:
        self._settings = settings
        self._knows = knows
        self._waiting: dict[Probe | _Sort, DriverEvent | Probe] = {}
        self._reported = asyncio.Event()
        self._urgent = asyncio.Event()

    def note(self, report: DriverEvent | Probe) -> None:
        """Have it judged with what else comes. An XID of an application says nothing of a GPU."""
        sort = report if isinstance(report, Probe) else self._sort(report)
        if isinstance(sort, tuple) and sort[-1] is XidClass.APPLICATION:
            return
        if sort not in self._waiting and not self._has_room(report.uuid):
            return
        self._waiting.setdefault(sort, report)
        if isinstance(report, DriverEvent):
            self._urgent.set()
        self._reported.set()

    async def next(self) -> tuple[DriverEvent | Probe, ...]:
        """Wait for reports, and a little for those that belong to the same verdict."""
        await self._reported.wait()
        if not self._urgent.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.coalesce):
                    await self._urgent.wait()
        await asyncio.sleep(self._settings.gather)
        self._reported.clear()
        self._urgent.clear()
        reports, self._waiting = tuple(self._waiting.values()), {}
        return reports

    def _sort(self, event: DriverEvent) -> _Sort:
        if event.kind is not EventKind.XID:
            return event.kind, event.uuid, None
        return event.kind, event.uuid, xid_class(event.xid or 0, self._settings)

    def _has_room(self, uuid: GpuUuid | None) -> bool:
        return len(self._waiting) < MOST_STRANGE or uuid is None or self._knows(uuid)
