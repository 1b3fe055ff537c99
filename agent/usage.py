"""What containers use: HAMi-core's regions, who lives in them, feedback, memory at its limit."""

import asyncio
import contextlib
import datetime as dt
import functools
import itertools
import math
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

import msgspec
import structlog

from agent.allocate.room import takes_room
from agent.cluster import NodeEvent, PodTable
from agent.errors import StateError
from agent.hami.region import (
    HEAD_SIZE,
    TRUNCATED,
    MemoryUse,
    NoRegion,
    Region,
    RegionChange,
    RegionGpu,
    RegionState,
    RegionSums,
    count_slots,
    decode_region,
    encode_change,
    holds_back,
    recognise,
)
from agent.hookdirs import names_in, open_containers, open_in
from agent.kit.cell import Cell
from agent.kit.tasks import Offload
from agent.kit.timing import Lag, loop_time, until_tick
from agent.ledger import DIRECTORY_NAME, ContainerKey, Ledger, Row
from agent.model import MIB, GpuUuid, Inventory
from agent.ports import Clock

log = structlog.get_logger(__name__)

# Tells which processes of containers exist, by the host's /proc and its cgroup tree.
#
# HAMi-core knows a process by its PID in the container, and one that was killed keeps its slot. The
# kernel lists the host's PIDs of a container's cgroup, and for each the PID in the container.

INIT_NAMESPACE: Final = "pid:[4026531836]"
"""The host's own PID namespace. Source: Linux include/linux/proc_ns.h (PROC_PID_INIT_INO)."""
CONTROLLERS: Final = ("pids", "memory", "systemd", ".")
"""Where pods may be in the cgroup tree: with cgroup v1 each controller has a tree of its own."""
DEEPEST: Final = 5
"""How deep the cgroup of a pod may be, as in kubelet/kubepods/burstable/pod<UID>."""
CGROUPS: Final = 64
"""Cgroups of one pod: a container may have some below its own."""
LOOKUPS: Final = 50
"""Processes of one cgroup whose PID in the container is read in one round; the next goes on."""
READ: Final = 64 * 1024
POD: Final = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?:\.slice)?$")
NSPID: Final = re.compile(rb"^NSpid:.*\s(\d+)$", re.MULTILINE)


class ContainerProcesses:
    """Remembers between rounds what it found, because asking about one process costs 20 µs.

    `cgroups`: the cgroup tree. `proc`: /proc, which must show the processes of the host.
    """

    def __init__(self, cgroups: Path, proc: Path = Path("/proc")) -> None:
        self._cgroups = cgroups
        self._proc = proc
        self._is_due = False
        self._pods: dict[str, Path] = {}
        """The cgroups of the pods that were ever seen; a path stays when its cgroup is gone."""
        self._owners: dict[Path, str] = {}
        """The container directory that is mounted in a cgroup's processes; empty: none is."""
        self._known: dict[Path, dict[int, int]] = {}
        """By cgroup, and the host's PID: the PID in the container."""

        # Whether this is the host's PID namespace, and processes of others are not hidden.
        namespace = ""
        with contextlib.suppress(OSError):
            namespace = str((proc / "self/ns/pid").readlink())
        self._is_host = namespace == INIT_NAMESPACE and _read(proc / "1/status") != b""

    def begin(self, names: Iterable[str]) -> None:
        """Begin a round about the containers of these directories."""
        uids = frozenset(map(_uid, names))
        self._pods = {uid: path for uid, path in self._pods.items() if uid in uids}
        self._owners = {path: name for path, name in self._owners.items() if path.is_dir()}
        self._known = {path: pids for path, pids in self._known.items() if path in self._owners}
        self._is_due = self._is_host and bool(uids)

    def alive(self, name: str, wanted: frozenset[int]) -> frozenset[int] | None:
        """Those of the PIDs in the container of that directory that exist; None: not known."""
        uid, living = _uid(name), frozenset[int]()

        # One search a round, and only for a pod that is asked about: one that was just answered has
        # no cgroup yet.
        if self._is_due and not (uid in self._pods and self._pods[uid].is_dir()):
            self._is_due = False
            trees = (dict(_pods(self._cgroups / controller, DEEPEST)) for controller in CONTROLLERS)
            self._pods |= next(filter(None, trees), {})

        if uid not in self._pods:
            return None

        cgroups = _directories(self._pods[uid])  # none, if it is gone: then no process lives
        if len(cgroups) == CGROUPS:
            return None

        for cgroup in cgroups:
            pids = _pids(cgroup)
            # A directory without this file, as in the sandbox, tells of no processes.
            if pids is None or not (pids or (cgroup / "cgroup.procs").exists()):
                return None

            if cgroup not in self._owners:
                mounted = re.compile(f"/({uid}_[-a-z0-9]+) ".encode())
                texts = (_read(self._proc / f"{pid}/mountinfo") for pid in pids[:3])
                text = next(filter(None, texts), b"")
                if pids and not text:
                    return None
                if text:
                    found = mounted.search(text)
                    self._owners[cgroup] = found[1].decode() if found else ""

            if self._owners.get(cgroup) == name:
                matched = self._matched(cgroup, pids, wanted)
                if matched is None:
                    return None
                living |= matched

        return living

    def _matched(
        self, cgroup: Path, pids: tuple[int, ...], wanted: frozenset[int]
    ) -> frozenset[int] | None:
        """Those of the wanted PIDs that a process of the cgroup has; None: not all were asked."""
        before = self._known.get(cgroup, {})
        known = self._known[cgroup] = {pid: before[pid] for pid in pids if pid in before}
        missing = wanted - set(known.values())
        unknown = [pid for pid in pids if pid not in known]
        for pid in unknown[:LOOKUPS]:
            if not missing:
                break
            if found := NSPID.search(_read(self._proc / f"{pid}/status")):
                known[pid] = int(found[1])
                missing -= {known[pid]}

        return None if missing and len(unknown) > LOOKUPS else wanted - missing


def _read(path: Path) -> bytes:
    """The first READ bytes of a file of the kernel; nothing if it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as opened:
        return opened.read(READ)
    return b""


def _pids(cgroup: Path) -> tuple[int, ...] | None:
    """The host's PIDs in the cgroup and below; None: more than is read."""
    text, pending = b"", [cgroup]
    for _ in range(CGROUPS):
        here = pending.pop()
        text += _read(here / "cgroup.procs") + b"\n"
        pending += _directories(here)
        if not pending or len(text) >= READ:
            break

    return None if pending or len(text) >= READ else tuple(map(int, text.split()))


def _uid(name: str) -> str:
    return name.partition("_")[0]


def _directories(path: Path) -> list[Path]:
    """At most CGROUPS directories in this one; none if it is gone."""
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        found = (path / entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        return list(itertools.islice(found, CGROUPS))
    return []


def _pods(path: Path, depth: int) -> Iterator[tuple[str, Path]]:
    """The UIDs of pods and their cgroups below this one, which no pod may write."""
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for name in names:
            if found := POD.search(name):
                yield found[1].replace("_", "-"), path / name
            elif depth > 1:
                yield from _pods(path / name, depth - 1)


# HAMi-core's shared regions in the container directories: read with pread, never mapped.
#
# Any process of a container may change, replace or shorten its file at any time. Only a regular
# file with one name is opened. What costs time is bounded for each container, and for all together.
# One region is in memory at a time.

PLACE: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
FILE: Final = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""O_NONBLOCK: an owner's lease on the file would hold up open() for 45 s."""
ENTRIES: Final = 256
"""A container directory with more entries is not searched."""
SLOW: Final = 0.001
"""Seconds of CPU that a region may cost in each round."""
COOLING: Final = 0.9
"""A cheaper reading takes a tenth off a region's cost: being slow now and then gains nothing."""
SHARE: Final = 0.004
"""The part of a core that all slower regions may cost together in the long run."""

ROUND: Final = 2.0
"""Seconds after which a round leaves the rest to the next."""
SLOW_ROUND: Final = 0.02
"""The same for the slow regions, which go last: a round is 5 s, and SHARE of it."""


class _Cost(NamedTuple):
    """The CPU seconds of reading a region, and the loop time of the last reading."""

    seconds: float = 0.0
    at: float = -math.inf


class HostRegions:
    """HAMi-core's shared regions below `hook`, HAMi's HOOK_PATH. All work is done on `offload`.

    Containers may write anything there. A region that cannot be read is a reading with its reason,
    never an error. One that costs too much is read rarely.

    `processes`: tells which processes exist; without it nobody knows. `cpu`: the CPU seconds of the
    present thread.
    """

    def __init__(
        self,
        hook: Path,
        offload: Offload,
        processes: ContainerProcesses | None = None,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._hook = hook
        self._offload = offload
        self._processes = processes
        self._cpu = cpu
        self._costs: dict[str, _Cost] = {}

    async def read(self, names: Sequence[str]) -> Mapping[str, RegionSums]:
        """Read the regions of these container directories. Raises StateError."""
        now = asyncio.get_running_loop().time
        return await self._offload.call(self._read, tuple(names), now)

    async def held(self) -> Sequence[str]:
        """All container directories whose region holds launches back. Raises StateError."""
        return await self._offload.call(self._held)

    async def write(self, changes: Mapping[str, RegionChange]) -> Mapping[str, str]:
        """Write each change; return why not for each that was not written. Raises StateError."""
        return await self._offload.call(self._write, dict(changes))

    def _read(self, names: Sequence[str], now: Callable[[], float]) -> Mapping[str, RegionSums]:
        end, sums = now() + ROUND, dict[str, RegionSums]()
        costs = self._costs = {name: self._costs.get(name, _Cost()) for name in names}
        slow = sum(cost.seconds > SLOW for cost in costs.values())

        if self._processes is not None:
            self._processes.begin(names)

        with open_containers(self._hook) as containers:
            # Slow regions go last. Of the others, those go first that the last round did not reach.
            for name in sorted(
                names, key=lambda name: (costs[name].seconds > SLOW, costs[name].at)
            ):
                cost, pause = costs[name], 0.0
                if cost.seconds > SLOW:
                    pause = cost.seconds * slow / SHARE
                    end = min(end, now() + SLOW_ROUND)

                if now() > end:
                    reason = "other regions took the time of this round"
                elif now() < cost.at + pause:
                    ms = round(cost.seconds * 1000)
                    reason = f"reading it takes {ms} ms of CPU, so it is read every {pause:.0f} s"
                else:
                    sums[name], spent = self._summed(containers, name)
                    if spent > SLOW and not pause:
                        # Something else, such as a garbage collection, may have taken the time.
                        sums[name], spent = self._summed(containers, name)
                    costs[name] = _Cost(max(spent, COOLING * cost.seconds), now())
                    continue

                sums[name] = RegionSums(RegionState.UNREADABLE, reason=reason)

        return sums

    def _summed(self, containers: int | None, name: str) -> tuple[RegionSums, float]:
        """Read and sum a region; also the CPU seconds that this costs."""
        begun, alive = self._cpu(), None

        try:
            with _opened(containers, name, os.O_RDONLY) as (file, size):
                region = read_region(size, functools.partial(os.pread, file))
            pids = frozenset(process.pid for process in region.processes)
            if self._processes and pids:
                alive = self._processes.alive(name, pids)
            sums = region.sums(alive)
        except NoRegion as error:
            sums = error.sums

        return sums, self._cpu() - begun

    def _held(self) -> Sequence[str]:
        with open_containers(self._hook) as containers:
            held = list[str]()
            for name in names_in(containers):
                # By its tail: nothing bounds what a tenant makes reading all slots of all cost.
                with (
                    contextlib.suppress(NoRegion),
                    _opened(containers, name, os.O_RDONLY) as (file, size),
                ):
                    offsets = recognise(size, os.pread(file, HEAD_SIZE, 0))
                    if holds_back(os.pread(file, offsets.tail_size, offsets.tail)):
                        held.append(name)

            return held

    def _write(self, changes: Mapping[str, RegionChange]) -> Mapping[str, str]:
        reasons = dict[str, str]()
        with open_containers(self._hook) as containers:
            for name, change in changes.items():
                try:
                    with _opened(containers, name, os.O_RDWR) as (file, size):
                        offsets = recognise(size, os.pread(file, HEAD_SIZE, 0))
                        for offset, word in encode_change(offsets, change):
                            # A write beyond its end would make a file that was shortened longer.
                            if os.fstat(file).st_size != size:
                                reasons[name] = TRUNCATED
                                break
                            os.pwrite(file, word, offset)
                except NoRegion as error:
                    reasons[name] = error.sums.reason or f"it is {error.sums.state}"

        return reasons


@contextlib.contextmanager
def _opened(containers: int | None, name: str, access: int) -> Iterator[tuple[int, int]]:
    """Open the region of the container directory: the file and its size.

    Raises NoRegion, also for an OSError within.
    """
    if not DIRECTORY_NAME.fullmatch(name):
        raise NoRegion("its directory's name is not <pod UID>_<container>")
    if containers is None:
        raise NoRegion(state=RegionState.ABSENT)

    with contextlib.ExitStack() as open_files:
        try:
            directory = open_in(open_files, name, containers)
            # It is looked at without opening it: opening a device could act on it.
            place = open_in(open_files, _region_name(directory), directory, PLACE)
            status = os.fstat(place)
            if not stat.S_ISREG(status.st_mode):
                raise NoRegion("it is not a regular file")
            if status.st_nlink > 1:
                raise NoRegion(f"it has {status.st_nlink} names instead of one")

            # This path names the inode that was checked, whatever has its name now.
            file = open_in(open_files, f"/proc/self/fd/{place}", None, access | FILE)
            yield file, status.st_size
        except FileNotFoundError:
            raise NoRegion(state=RegionState.ABSENT) from None
        except OSError as error:
            raise NoRegion(f"it or its directory cannot be used: {error.strerror}") from error


def _region_name(directory: int) -> str:
    """Choose the region as HAMi's monitor does. Raises FileNotFoundError, NoRegion.

    Source: HAMi pkg/monitor/nvidia/cudevshr.go (loadCache).
    """
    with os.scandir(directory) as entries:
        names = [entry.name for entry in itertools.islice(entries, ENTRIES + 1)]

    if len(names) > ENTRIES:
        raise NoRegion(f"its directory has more than {ENTRIES} entries")

    libraries = [name for name in names if "libvgpu.so" in name]
    regions = [name for name in names if name.endswith(".cache") and name not in libraries]
    if len(libraries) + len(regions) > 2:
        raise NoRegion("its directory has more than one file that may be it")

    if not regions:
        raise FileNotFoundError

    return min(regions)


def read_region(size: int, pread: Callable[[int, int], bytes]) -> Region:
    """Read a region of `size` bytes. Raises NoRegion.

    `pread`: read so many bytes at an offset; fewer, where the file ends. Its errors pass.
    """
    head = pread(HEAD_SIZE, 0)
    offsets = recognise(size, head)
    tail = pread(offsets.tail_size, offsets.tail)
    if len(tail) < offsets.tail_size:
        raise NoRegion(TRUNCATED)

    length = count_slots(tail) * offsets.slot_size
    slots = pread(length, offsets.slots)
    if len(slots) < length:
        raise NoRegion(TRUNCATED)

    return decode_region(offsets, head, tail, slots)


# What a region says of the use, as far as it is believable.

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

        return ContainerUse(
            use.at, RegionState.UNREADABLE, reason=f"not believable: it says {claim}"
        )

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
            self._report(
                "usage.unread", str(error) or f"the regions were not read in {DEADLINE:g} s"
            )
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
            text = f"the regions were not written in {WRITE_DEADLINE:g} s"
            self._report("usage.unwritten", str(error) or text)
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
