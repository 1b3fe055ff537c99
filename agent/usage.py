"""What containers use: regions sampled, feedback between them, memory at its limit."""

import asyncio
import datetime as dt
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn

import msgspec
import structlog

from agent.allocate.room import takes_room
from agent.cluster import NodeEvent, PodTable
from agent.errors import StateError
from agent.hami.region import MemoryUse, Region, RegionChange, RegionGpu, RegionState, RegionSums
from agent.kit.cell import Cell
from agent.kit.timing import Lag, loop_time, until_tick
from agent.ledger import ContainerKey, Ledger, Row
from agent.model import MIB, GpuUuid, Inventory
from agent.ports import Clock
from agent.regions import HostRegions

MOST_MIB: Final = 1 << 20
"""More memory than a GPU can have whose size is not known."""

MOST_AT_ONCE: Final = 16
"""Processes that count with 100 percent each: samples of several moments are summed."""


class ContainerGpuUse(RegionGpu, frozen=True):
    """The use of one GPU by one container.

    - `uuid`: see `use_of`.
    - `memory`: bytes. `sm_percent`: of the whole GPU; the sum may exceed 100.
    """

    memory: MemoryUse
    sm_percent: int


class ContainerUse(msgspec.Struct, frozen=True):
    """The use of a container's GPUs at one time.

    - `last_kernel`: None: not known. `processes`: how many live ones use the region.
    - `reason`: why nothing is known, as in RegionSums; empty otherwise.
    """

    at: dt.datetime
    state: RegionState
    gpus: tuple[ContainerGpuUse, ...] = ()
    last_kernel: dt.datetime | None = None
    processes: int = 0
    reason: str = ""

    @property
    def idle(self) -> dt.timedelta | None:
        """The time since the last kernel; None: not known. A clock set back counts as no time."""
        if self.last_kernel is None:
            return None
        return max(self.at - self.last_kernel, dt.timedelta())


def use_of(sums: RegionSums, at: dt.datetime, given: Sequence[GpuUuid] = ()) -> ContainerUse:
    """The use that a region says.

    `given`: the GPUs that the container was given, in CUDA's order; empty: not known. The uuids of
    the result are always of these. If the region names others, its GPUs count by position.
    """
    region = sums.region
    if region is None:
        return ContainerUse(at, sums.state, reason=sums.reason)

    uuids: Sequence[str] = [gpu.uuid for gpu in region.gpus]
    if given and not (len({*uuids}) == len(uuids) and {*uuids} <= {*given}):
        # By position; GPUs beyond those that were given have none.
        uuids = tuple(dict.fromkeys(given))

    return ContainerUse(
        at=at,
        state=sums.state,
        gpus=tuple(
            ContainerGpuUse(gpu.index, uuid, gpu.memory_limit, gpu.core_limit, memory, percent)
            for gpu, uuid, memory, percent in zip(
                region.gpus, uuids, sums.memory, sums.sm_percent, strict=False
            )
        ),
        last_kernel=region.last_kernel,
        processes=sums.processes,
    )


def believed(use: ContainerUse, row: Row, registered: Mapping[GpuUuid, int]) -> ContainerUse:
    """The use; or, if a GPU cannot be used that much, an unreadable one with that reason.

    `registered`: the MiB of each GPU, as far as they are known.
    """
    percent = 100 * min(use.processes, MOST_AT_ONCE)
    for gpu in use.gpus:
        # Memory that was promised before the settings made the GPU smaller counts as well.
        promised = [share.memory_mib for share in row.limits if share.uuid == gpu.uuid]
        mib = max((registered.get(GpuUuid(gpu.uuid)) or MOST_MIB, *promised))
        used_mib = max(*gpu.memory, gpu.memory_limit) // MIB

        if used_mib > mib:
            claim = f"{used_mib:,} MiB of a GPU with at most {mib:,} MiB"
        elif gpu.sm_percent > percent:
            most = f"at most {percent:,} % for its processes"
            claim = f"{gpu.sm_percent:,} % of compute of a GPU with {most}"
        else:
            continue

        reason = f"not believable: it says {claim}"
        return ContainerUse(use.at, RegionState.UNREADABLE, reason=reason)

    return use


# Decides which containers are limited and held back while others use the same GPUs.
#
# It is the feedback loop of HAMi's vGPUmonitor with the same results for equal inputs. Source: HAMi
# v2.10 cmd/vGPUmonitor/feedback.go, CheckBlocking, CheckPriority and Observe. It differs in what it
# takes for activity, and in whom it believes:
#
# - HAMi only counts recent_kernel. From HAMi-core 2.8.1 on, a container that is not limited never
#   sets it, so two containers that start one after the other are never limited. Here the time of
#   the last kernel and the use of SMs count too. CUDA graphs and long kernels show only in the
#   latter.
# - A new process also sets the time of the last kernel, for example nvidia-smi in a probe. So that
#   time limits others to their shares, but does not hold them back.
# - GPUs and priority come from the row. A region can only give up some of its priority.

ACTIVE_FOR: Final = dt.timedelta(seconds=10)
"""For how long a container counts as active after its last kernel, or its last use of an SM."""

HIGHEST_RECENT: Final = 5
"""The highest recent_kernel that is counted down. HAMi-core sets 2; any process can set more."""

HELD: Final = -1
"""The recent_kernel with which HAMi-core holds launches back."""


class RegionUser(msgspec.Struct, frozen=True):
    """A container with a readable region.

    - `gpus`, `priority`: those that count; a smaller number goes first, below 0: apart from others.
    - `is_limiting`, `recent_kernel`: as the region has them.
    - `is_active`: there was a kernel or a new process, or an SM was used, within ACTIVE_FOR.
    - `is_working`: an SM was used within ACTIVE_FOR.
    """

    gpus: frozenset[GpuUuid]
    priority: int
    is_limiting: bool
    recent_kernel: int
    is_active: bool = False
    is_working: bool = False

    @property
    def counted_down(self) -> int:
        """The recent_kernel after this round, unless launches are held or released."""
        recent = min(self.recent_kernel, HIGHEST_RECENT)
        return recent - 1 if recent > 0 else recent


class Feedback(msgspec.Struct, frozen=True):
    """What one round decided, by directory: who is held back, who is limited, what to write."""

    held: frozenset[str] = frozenset()
    limited: frozenset[str] = frozenset()
    changes: Mapping[str, RegionChange] = msgspec.field(default_factory=dict)

    @property
    def release(self) -> Mapping[str, RegionChange]:
        """What to write so that nobody is held back or limited any more."""
        return {
            name: RegionChange(
                is_limiting=False if name in self.limited else None,
                recent_kernel=0 if name in self.held else None,
            )
            for name in self.held | self.limited
        }


def uses_sm(sums: RegionSums, now: dt.datetime) -> bool:
    """Whether a live process of the container uses an SM.

    The number of a dead process stays until another process starts or looks. So where it is not
    known who lives, a kernel must have run lately too.
    """
    if sums.region is None or not any(sums.sm_percent):
        return False
    return sums.knows_living or _is_recent(sums.region.last_kernel, now)


def region_user(
    row: Row, region: Region, now: dt.datetime, last_work: dt.datetime | None
) -> RegionUser:
    """Describe the container of `row`. `last_work`: when it last used an SM; None: not known."""
    is_working = _is_recent(last_work, now)
    return RegionUser(
        gpus=frozenset(row.gpus),
        priority=max(region.priority, row.priority),
        is_limiting=region.is_limiting,
        recent_kernel=region.recent_kernel,
        is_active=is_working or _is_recent(region.last_kernel, now),
        is_working=is_working,
    )


def feedback(users: Mapping[str, RegionUser]) -> Feedback:
    """One round over all containers with a readable region, by directory.

    - A container is held back while one of a smaller priority works on one of its GPUs.
    - It is limited while it is held back, or while more than one of its own priority is active on
      one of its GPUs.
    """
    # How many are active by GPU and priority, and the smallest priority that works on each GPU.
    active, working = Counter[tuple[GpuUuid, int]](), dict[GpuUuid, int]()
    for user in users.values():
        launches = user.counted_down > 0
        for gpu in user.gpus if user.priority >= 0 else ():
            if launches or user.is_active:
                active[gpu, user.priority] += 1
            if launches or user.is_working:
                working[gpu] = min(user.priority, working.get(gpu, user.priority))

    held, limited, changes = set[str](), set[str](), dict[str, RegionChange]()
    for name, user in users.items():
        if any(working.get(gpu, user.priority) < user.priority for gpu in user.gpus):
            held.add(name)

        if name in held or any(active[gpu, user.priority] > 1 for gpu in user.gpus):
            limited.add(name)

        recent = min(user.recent_kernel, HELD) if name in held else max(user.counted_down, 0)
        change = RegionChange(
            is_limiting=name in limited if (name in limited) != user.is_limiting else None,
            recent_kernel=recent if recent != user.recent_kernel else None,
        )
        if change != RegionChange():
            changes[name] = change

    return Feedback(frozenset(held), frozenset(limited), changes)


def _is_recent(moment: dt.datetime | None, now: dt.datetime) -> bool:
    """Whether it was within ACTIVE_FOR. A time that far ahead says nothing: a clock was set."""
    return moment is not None and abs(now - moment) <= ACTIVE_FOR


# Samples what each container uses of its GPUs every 5 s, and keeps the newest.
#
# After each round the limits of containers that share a GPU are switched, and people are told once
# of each container that has filled its memory limit. HAMi-core kills no process at the limit: it
# refuses further allocations, which no region records.

log = structlog.get_logger(__name__)

LIMIT_EVENT: Final = "MemoryLimitReached"
FULL: Final = 0.98
"""The share of the limit from which on hardly any allocation can succeed."""

PERIOD: Final = 5.0
"""Seconds between two rounds."""

TURN: Final = 1
"""See agent.kit.timing."""

DEADLINE: Final = 3.0
"""Seconds for reading all regions."""

WRITE_DEADLINE: Final = 1.0
"""Seconds for writing into them, also at the end."""

QUIET: Final = 60.0
"""Seconds between two lines of the log about one container."""

FRESH: Final = 2 * PERIOD + DEADLINE
"""Seconds for which a round counts as the present use."""


class _Sampled(msgspec.Struct, eq=False):
    """What is kept of one container from round to round.

    - `use`: as it was read last.
    - `last_work`: when it last used an SM. `is_full`: it has filled a limit; None: it may have
      before the agent started.
    """

    use: ContainerUse | None = None
    last_work: dt.datetime | None = None
    is_full: bool | None = False


class ContainerUsage:
    """Reads the regions of all rows that have a directory, and writes into them.

    The first round releases all that an earlier process held back, also without a row. With
    `observes` it only logs them. `switches`: also hold back and limit containers. All are released
    when run() ends, and while they or all regions cannot be read.

    `say` posts an Event about a pod. A container that was full before the agent started gets none.
    Nor does any in plain mode, where no pod is known.
    """

    def __init__(
        self,
        regions: HostRegions,
        ledger: Cell[Ledger],
        pods: Cell[PodTable],
        inventory: Cell[Inventory],
        clock: Clock,
        say: Callable[[NodeEvent], None],
        *,
        switches: bool,
        observes: bool = False,
    ) -> None:
        self._regions = regions
        self._ledger = ledger
        self._pods = pods
        self._inventory = inventory
        self._clock = clock
        self._say = say
        self._switches = switches
        self._observes = observes
        self._is_first = True
        self._sampled = {row.key: _Sampled(is_full=None) for row in ledger.value.rows}
        self._sampled_at = -FRESH
        self._feedback = Feedback()
        self._troubles: dict[tuple[str, str], tuple[str, float]] = {}

    def newest(self, key: ContainerKey) -> ContainerUse | None:
        """The use of a container's GPUs now; None: it has no directory, or nothing was read yet.

        A container whose region cannot be read has a use with the state and the reason.
        """
        return None if self._is_stale() or key not in self._sampled else self._sampled[key].use

    async def run(self) -> NoReturn:
        """Read all regions at each tick of PERIOD, for ever."""
        try:
            while True:
                await self._round()
                await asyncio.sleep(until_tick(PERIOD, TURN))
        finally:
            # In a task of its own, for its deadline: see agent.kubelet.door.
            await asyncio.shield(self._write(self._feedback.release))

    async def _round(self) -> None:
        # The rows of the ledger that may have processes. What is kept of others is dropped.
        rows = {
            row.directory: row
            for row in self._ledger.value.rows
            if row.directory and takes_room(row, self._pods.value)
        }
        self._sampled = {row.key: self._sampled.get(row.key) or _Sampled() for row in rows.values()}
        self._troubles = {
            place: trouble for place, trouble in self._troubles.items() if place[1] in {"", *rows}
        }
        try:
            async with Lag().within(DEADLINE):
                readings = await self._regions.read(tuple(rows)) if rows else {}
                left = await self._regions.held() if self._is_first else ()
        except (StateError, TimeoutError) as error:
            why = str(error) or f"the regions were not read in {DEADLINE:g} s"
            self._report("usage.unread", why)
            if self._is_stale():
                await self._write(self._feedback.release)
            return

        self._report("usage.unread", "")
        at, self._sampled_at = self._clock.now(), loop_time()
        registered = {
            gpu.uuid: max(gpu.registered_mib, gpu.gpu.memory_mib or 0)
            for gpu in self._inventory.value.gpus
        }
        for name, row in rows.items():
            use = use_of(readings[name], at, [share.uuid for share in row.shares])
            self._keep(row, believed(use, row, registered))

        if left and self._observes:
            log.warning("usage.held_back", directories=left, released="not by an observer")
            left = ()

        before = self._feedback.release
        if self._switches:
            users = dict[str, RegionUser]()
            for name, row in rows.items():
                sums, sampled = readings[name], self._sampled[row.key]
                if sums.region is not None:
                    sampled.last_work = at if uses_sm(sums, at) else sampled.last_work
                    users[name] = region_user(row, sums.region, at, sampled.last_work)

            self._feedback = feedback(users)

        changes = {
            name: RegionChange(recent_kernel=0) for name in left if name not in self._feedback.held
        }
        # A container that cannot be judged any more is not held back any more.
        changes |= {
            name: change
            for name, change in before.items()
            if name in readings and readings[name].state is RegionState.UNREADABLE
        }
        self._is_first &= not await self._write({**changes, **self._feedback.changes})

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

        for name, reason in {"": "", **failed}.items():
            self._report("usage.unwritten", reason, name)

        return True

    def _is_stale(self) -> bool:
        return loop_time() - self._sampled_at > FRESH

    def _keep(self, row: Row, use: ContainerUse) -> None:
        """Keep the use of one container, and say it if it has filled a limit for the first time."""
        sampled = self._sampled[row.key]
        sampled.use = use
        self._report("usage.unread", use.reason, row.directory)

        limited = (gpu for gpu in use.gpus if gpu.memory_limit)
        full = next((gpu for gpu in limited if gpu.memory.total >= FULL * gpu.memory_limit), None)
        if full and sampled.is_full is False and row.pod_uid:
            label = self._inventory.value.label(GpuUuid(full.uuid))
            text = (
                f"Container {row.key.container} uses {full.memory.total // MIB:,} of its "
                f"{full.memory_limit // MIB:,} MiB of GPU {label}. HAMi-core "
                "refuses what it allocates beyond that (CUDA_ERROR_OUT_OF_MEMORY) and kills no "
                "process. If the application fails for want of memory, ask for more "
                "nvidia.com/gpumem."
            )
            self._say(NodeEvent(LIMIT_EVENT, text, False, row.namespace, row.pod, row.pod_uid))

        sampled.is_full = bool(sampled.is_full or full)

    def _report(self, event: str, reason: str, directory: str = "") -> None:
        """Log why a region, or without a directory all of them, failed, until the reason changes.

        Containers can change it in each round, so there is at most one line a QUIET.
        """
        now = loop_time()
        before, logged_at = self._troubles.get((event, directory), ("", -QUIET))
        if reason == before or (reason and now - logged_at < QUIET):
            return

        if reason:
            log.warning(event, directory=directory or "all", err=reason)
            logged_at = now
        self._troubles[event, directory] = reason, logged_at
