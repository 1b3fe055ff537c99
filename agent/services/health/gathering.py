"""Collects reports that are judged together, because one failure causes many."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from agent.core.health.reports import DriverEvent, EventKind, Probe
from agent.core.health.settings import HealthSettings, xid_class
from agent.core.health.xids import XidClass
from agent.core.inventory.gpu import GpuUuid

MOST_STRANGE: Final = 1024
"""When this many reports wait, reports of unknown GPUs are dropped."""

_Sort = tuple[EventKind, GpuUuid | None, XidClass | None]
"""Of the events that wait with the same sort, only the first is judged."""


class Gathering:
    """Holds events for `gather` seconds and probes for `coalesce` seconds, then returns them.

    It keeps the first event of each sort. So the number of events is bounded by the number of GPUs,
    and a storm does not displace a more severe event.
    """

    def __init__(self, settings: HealthSettings, knows: Callable[[GpuUuid], bool]) -> None:
        self._settings = settings
        self._knows = knows
        self._waiting: dict[Probe | _Sort, DriverEvent | Probe] = {}
        self._reported = asyncio.Event()
        self._urgent = asyncio.Event()

    def note(self, report: DriverEvent | Probe) -> None:
        """Add a report to the next batch. XIDs of the class APPLICATION are ignored."""
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
        """Wait for reports, then for those that belong to the same verdict; return all."""
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
