"""Changes the limits of running containers. ContainerUsage holds HAMi-core's regions to them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
import structlog

from agent.core.cluster.pods import PodTable
from agent.core.containers.container_edits import container_directory
from agent.core.errors import StateError
from agent.core.inventory.inventory import Inventory
from agent.core.ports import Clock, Regions
from agent.core.state.ledger import ContainerKey, Ledger, Row
from agent.core.usage.limit_answer import LimitAnswer
from agent.core.usage.live_limits import (
    LimitFacts,
    LimitWish,
    busy,
    find_row,
    limited,
    wanted_change,
)
from agent.core.usage.region import RegionReading
from agent.core.usage.use import use_of
from agent.kit.cell import Cell

log = structlog.get_logger(__name__)

DEADLINE: Final = 4.0
"""Seconds for reading or writing a region."""


class LimitViews(msgspec.Struct, frozen=True):
    """What a decision reads. Allocate shares `pending` and `taken` (see AllocateCalls).

    `pending`: rows that are being written; they take room. `taken`: rows that are being answered
    or closed; they are not changed.
    """

    ledger: Cell[Ledger]
    inventory: Cell[Inventory]
    pods: Cell[PodTable]
    pending: dict[ContainerKey, Row]
    taken: set[ContainerKey]


class LiveLimits:
    """Sole writer of the rows' live limits. `commit` may raise StateError."""

    def __init__(
        self,
        views: LimitViews,
        regions: Regions,
        commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._views = views
        self._regions = regions
        self._commit = commit
        self._clock = clock
        self._one = asyncio.Lock()

    async def limit(self, wish: LimitWish) -> LimitAnswer:
        """Change the limits of one container. Raises LimitRefused.

        The ledger has them when this returns; the region also, unless the answer has an obstacle.
        Raises StateError: the disk or the regions cannot be used.
        """
        async with self._one:
            return await self._limit(wish)

    async def _limit(self, wish: LimitWish) -> LimitAnswer:
        found = find_row(wish, self._facts())
        reading = await self._read(_directory(found))
        # No await from here until the row is pending: an Allocate would give the same room away.
        facts = self._facts()
        row = facts.ledger.find(found.key)
        if row is None or row.key in self._views.taken:
            raise busy(found)
        use = use_of(reading, self._clock.now(), row.gpus)
        changed = limited(row, use, wish, facts)
        if changed is not row and not await self._store(changed):
            raise busy(row)
        layout = reading.region.layout if reading.region else None
        answer = LimitAnswer(row, changed, await self._write(changed, reading), layout)
        log.info("limits.set", ns=row.namespace, pod=row.pod, changed=answer.changed)
        return answer

    def _facts(self) -> LimitFacts:
        views, ledger = self._views, self._views.ledger.value
        for row in views.pending.values():
            ledger = ledger.put(row)
        return LimitFacts(ledger, views.inventory.value, views.pods.value.pods)

    async def _store(self, row: Row) -> bool:
        """Commit the row's live limits; an Allocate counts them already. False: its row is gone."""

        def change(ledger: Ledger) -> Ledger:
            present = ledger.find(row.key)
            if present is None:
                return ledger
            return ledger.put(msgspec.structs.replace(present, live_limits=row.live_limits))

        pending = self._views.pending
        pending[row.key] = row
        try:
            await self._commit(change)
        finally:
            if pending.get(row.key) is row:
                del pending[row.key]
        return self._views.ledger.value.find(row.key) is not None

    async def _read(self, name: str) -> RegionReading:
        try:
            async with asyncio.timeout(DEADLINE):
                return (await self._regions.read((name,)))[name]
        except TimeoutError as error:
            raise StateError(
                f"HAMi-core's region was not read in {DEADLINE:g} s; look at the node's disk"
            ) from error

    async def _write(self, row: Row, reading: RegionReading) -> str:
        """Write what the region lacks. Returns why not; empty: it was written, or lacks nothing."""
        name, change = _directory(row), wanted_change(row, reading)
        if change is None:
            return ""
        try:
            async with asyncio.timeout(DEADLINE):
                return (await self._regions.write({name: change})).get(name, "")
        except (StateError, TimeoutError) as error:
            return str(error) or f"the disk has not answered for {DEADLINE:g} s"


def _directory(row: Row) -> str:
    return container_directory(row.key.pod_uid, row.key.container)
