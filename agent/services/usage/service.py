"""Samples what each container uses of its GPUs every 5 s, and keeps it for 15 minutes in memory.

After each round the limits of containers that share a GPU are switched, by agent.core.usage.
"""

import asyncio
import datetime as dt
from collections.abc import Iterator, Mapping
from typing import Final, NoReturn

import structlog

from agent.core.allocation.room import takes_room
from agent.core.cluster.pods import PodTable
from agent.core.containers.edits import container_directory
from agent.core.errors import StateError
from agent.core.inventory.inventory import Inventory
from agent.core.ports import Clock, Regions
from agent.core.state.ledger import ContainerKey, Ledger, Row
from agent.core.usage.feedback import Feedback, RegionUser, feedback, region_user, uses_sm
from agent.core.usage.history import PastUse, numbers_of, past_use
from agent.core.usage.region import RegionChange, RegionState, RegionSums
from agent.core.usage.use import ContainerUse, believed, use_of
from agent.kit.cell import Cell
from agent.kit.ring import Ring
from agent.kit.running_time import Lag
from agent.kit.ticks import until_tick

log = structlog.get_logger(__name__)

PERIOD: Final = 5.0
TURN: Final = 1
"""See agent.kit.ticks."""
DEADLINE: Final = 3.0
"""Seconds for reading all regions."""
WRITE_DEADLINE: Final = 1.0
"""Seconds for writing into them, also at the end."""
KEPT: Final = 900.0
"""Seconds for which the numbers of a round are kept."""

ROWS: Final = round(KEPT / PERIOD)
"""A row has 8 bytes for its time and 16 for each GPU: 4,320 bytes for a container with one."""

QUIET: Final = 60.0
"""Seconds between two lines of the log about one container."""

FRESH: Final = 2 * PERIOD + DEADLINE
"""Seconds for which a round counts as the present use."""


class ContainerUsage:
    """Reads the regions of all rows that have a directory, and writes into them.

    The history of a container has a gap while its region cannot be read, ends with its row or its
    pod, and begins anew if the region lists other GPUs than before.

    The first round releases all that an earlier process held back, also without a row. With
    `observes` it only logs them. `switches`: also hold back and limit containers. All are released
    when run() ends, and while they or all regions cannot be read.
    """

    def __init__(
        self,
        regions: Regions,
        ledger: Cell[Ledger],
        pods: Cell[PodTable],
        inventory: Cell[Inventory],
        clock: Clock,
        *,
        switches: bool,
        observes: bool = False,
    ) -> None:
        self._regions = regions
        self._ledger = ledger
        self._pods = pods
        self._inventory = inventory
        self._clock = clock
        self._switches = switches
        self._observes = observes
        self._origin = clock.now() - dt.timedelta(seconds=_loop_time())
        self._rows: Mapping[str, Row] = {}
        self._is_first = True
        self._newest: dict[ContainerKey, ContainerUse] = {}
        self._newest_at = -FRESH
        self._kept: dict[ContainerKey, tuple[tuple[str, ...], Ring]] = {}
        self._worked: dict[ContainerKey, dt.datetime] = {}
        self._feedback = Feedback()
        self._troubles: dict[tuple[str, str], tuple[str, float]] = {}

    @property
    def bytes(self) -> int:
        """The memory that the history takes, in bytes."""
        return sum(ring.bytes for _, ring in self._kept.values())

    def newest(self, key: ContainerKey) -> ContainerUse | None:
        """The use of a container's GPUs now; None: it has no directory, or nothing was read yet.

        A container whose region cannot be read has a use with the state and the reason.
        """
        return None if self._is_stale() else self._newest.get(key)

    def history(self, key: ContainerKey) -> tuple[PastUse, ...]:
        """The use of a container's GPUs in the last KEPT seconds, the oldest first."""
        if key not in self._kept:
            return ()
        uuids, ring = self._kept[key]
        since = _loop_time() - KEPT
        return tuple(
            past_use(self._origin + dt.timedelta(seconds=row[0]), uuids, row[1:])
            for row in ring.rows()
            if row[0] >= since
        )

    async def run(self) -> NoReturn:
        """Read all regions at each tick of PERIOD, for ever."""
        try:
            while True:
                await self._round()
                await asyncio.sleep(until_tick(PERIOD, TURN))
        finally:
            # In a task of its own, for its deadline: see agent.plugin.server.
            await asyncio.shield(self._write(self._feedback.release))

    async def _round(self) -> None:
        self._follow()
        try:
            async with Lag().within(DEADLINE):
                readings = await self._regions.read(tuple(self._rows)) if self._rows else {}
                left = await self._regions.held() if self._is_first else ()
        except (StateError, TimeoutError) as error:
            why = str(error) or f"the regions were not read in {DEADLINE:g} s"
            self._report("usage.unread", why)
            if self._is_stale():
                await self._write(self._feedback.release)
            return
        self._report("usage.unread", "")
        at = self._clock.now()
        self._keep(readings, at)
        if left and self._observes:
            log.warning("usage.held_back", directories=left, released="not by an observer")
            left = ()
        before = self._feedback.release
        if self._switches:
            self._feedback = feedback(dict(self._users(readings, at)))
        release = {
            name: RegionChange(recent_kernel=0) for name in left if name not in self._feedback.held
        }
        # A container that cannot be judged any more is not held back any more.
        release |= {
            name: change
            for name, change in before.items()
            if name in readings and readings[name].state is RegionState.UNREADABLE
        }
        is_written = await self._write({**release, **self._feedback.changes})
        self._is_first &= not is_written

    def _users(
        self, readings: Mapping[str, RegionSums], at: dt.datetime
    ) -> Iterator[tuple[str, RegionUser]]:
        for name, row in self._rows.items():
            sums = readings[name]
            if sums.region is None:
                continue
            if uses_sm(sums, at):
                self._worked[row.key] = at
            yield name, region_user(row, sums.region, at, self._worked.get(row.key))

    async def _write(self, changes: Mapping[str, RegionChange]) -> bool:
        """Write the changes; False if the directories as a whole take none."""
        if not changes:
            return True
        try:
            async with asyncio.timeout(WRITE_DEADLINE):
                failed = await self._regions.write(changes)
        except (StateError, TimeoutError) as error:
            why = str(error) or f"the regions were not written in {WRITE_DEADLINE:g} s"
            self._report("usage.unwritten", why)
            return False
        self._report("usage.unwritten", "")
        for name, reason in failed.items():
            self._report("usage.unwritten", reason, name)
        return True

    def _is_stale(self) -> bool:
        return _loop_time() - self._newest_at > FRESH

    def _follow(self) -> None:
        """Take the rows of the ledger that may have processes, and drop what is kept of others."""
        self._rows = {
            container_directory(row.key.pod_uid, row.key.container): row
            for row in self._ledger.value.rows
            if row.has_directory and takes_room(row, self._pods.value)
        }
        keys = {row.key for row in self._rows.values()}
        self._kept = {key: kept for key, kept in self._kept.items() if key in keys}
        self._worked = {key: at for key, at in self._worked.items() if key in keys}
        self._troubles = {
            (event, name): trouble
            for (event, name), trouble in self._troubles.items()
            if not name or name in self._rows
        }

    def _keep(self, readings: Mapping[str, RegionSums], at: dt.datetime) -> None:
        now = _loop_time()
        registered = {
            gpu.uuid: max(gpu.registered_mib, gpu.gpu.memory_mib or 0)
            for gpu in self._inventory.value.gpus
        }
        newest = dict[ContainerKey, ContainerUse]()
        for name, row in self._rows.items():
            use = use_of(readings[name], at, [share.uuid for share in row.shares])
            use = newest[row.key] = believed(use, row, registered)
            self._report("usage.unread", use.reason, name)
            if use.gpus:
                uuids = tuple(gpu.uuid for gpu in use.gpus)
                kept = self._kept.get(row.key)
                if kept is None or kept[0] != uuids:
                    kept = self._kept[row.key] = uuids, Ring(ROWS, 1 + 2 * len(uuids))
                kept[1].add(now, *numbers_of(use))
        self._newest, self._newest_at = newest, now

    def _report(self, event: str, reason: str, directory: str = "") -> None:
        """Log why a region, or without a directory all of them, failed, until the reason changes.

        Containers can change it in each round, so there is at most one line a QUIET.
        """
        place, now = (event, directory), _loop_time()
        before, logged_at = self._troubles.get(place, ("", -QUIET))
        if reason and reason != before and now - logged_at >= QUIET:
            log.warning(event, directory=directory or "all", err=reason)
            self._troubles[place] = reason, now
        elif not reason and not directory:
            self._troubles[place] = "", logged_at


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
