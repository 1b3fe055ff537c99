"""What containers use: HAMi-core's regions, who lives in them, and feedback between them."""

import asyncio
import contextlib
import dataclasses
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
from typing import Final, NoReturn

import msgspec
import structlog

from agent.cluster import PodTable
from agent.errors import StateError
from agent.hami.region import (
    HEAD_SIZE,
    TRUNCATED,
    NoRegion,
    Region,
    RegionChange,
    RegionGpu,
    RegionState,
    RegionSums,
    encode_change,
    read_region,
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

# Tells which processes of containers exist: HAMi-core knows one by its PID in the container, and a
# killed one keeps its slot. The kernel lists a cgroup's PIDs on the host, and for each that PID.

INIT_NAMESPACE: Final = "pid:[4026531836]"  # the host's, by Linux's PROC_PID_INIT_INO
CGROUPS: Final = 64  # cgroups of one pod: a container may have some below its own
LOOKUPS: Final = 50  # PIDs of one cgroup that are translated in one round; the next goes on
READ: Final = 64 * 1024
POD: Final = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?:\.slice)?$")
NSPID: Final = re.compile(rb"^NSpid:.*\s(\d+)$", re.MULTILINE)


class ContainerProcesses:
    """Remembers between rounds what it found, because asking about one process costs 20 µs.

    `proc` must show the processes of the host.
    """

    def __init__(self, cgroups: Path, proc: Path = Path("/proc")) -> None:
        self._cgroups = cgroups
        self._proc = proc
        self._is_due = False  # whether the last round asked about a pod whose cgroup is not known
        # The cgroups of the pods that were ever seen; a path stays when its cgroup is gone.
        self._pods: dict[str, Path] = {}
        # The container directory that is mounted in a cgroup's processes; empty: none is.
        # And the PIDs in the container, by the host's.
        self._seen: dict[Path, tuple[str, dict[int, int]]] = {}
        # Whether this is the host's PID namespace, and processes of others are not hidden.
        namespace = os.path.realpath(proc / "self/ns/pid")
        self._is_host = namespace.endswith(INIT_NAMESPACE) and _read(proc / "1/status") != b""

    def begin(self, names: Iterable[str]) -> None:
        """Begin a round about the containers of these directories."""
        uids = {name.partition("_")[0] for name in names}
        self._pods = {uid: path for uid, path in self._pods.items() if uid in uids}
        self._seen = {path: seen for path, seen in self._seen.items() if path.is_dir()}
        # One search a round, and not at the cost of a region. A pod that was just answered has no
        # cgroup yet, so only one that was asked about is searched for.
        if self._is_due:
            self._pods |= _pods(self._cgroups)
        self._is_due = False

    def alive(self, name: str, wanted: frozenset[int]) -> frozenset[int] | None:
        """Those of the PIDs in the container of that directory that exist; None: not known."""
        uid, living = name.partition("_")[0], frozenset[int]()
        if uid not in self._pods or not self._pods[uid].is_dir():
            self._is_due = self._is_host
        if uid not in self._pods:
            return None

        _, children, _ = next(os.walk(self._pods[uid]), ("", [], []))  # gone: no process lives
        if len(children) >= CGROUPS:
            return None

        is_whole = True
        for cgroup in map(self._pods[uid].joinpath, children):
            pids = _pids(cgroup)
            # A directory without this file, as in the sandbox, tells of no processes.
            if pids is None or not (pids or (cgroup / "cgroup.procs").exists()):
                return None

            if pids and cgroup not in self._seen:
                texts = (_read(self._proc / f"{pid}/mountinfo") for pid in pids[:3])
                text = next(filter(None, texts), b"")
                if not text:
                    return None
                mounted = re.search(f"/({uid}_[-a-z0-9]+) ".encode(), text)
                self._seen[cgroup] = mounted[1].decode() if mounted else "", {}

            owner, before = self._seen.get(cgroup, ("", {}))
            if owner == name:
                known = {pid: before[pid] for pid in pids if pid in before}
                self._seen[cgroup] = owner, known
                unknown = [pid for pid in pids if pid not in known]
                for pid in unknown[:LOOKUPS]:
                    if found := NSPID.search(_read(self._proc / f"{pid}/status")):
                        known[pid] = int(found[1])
                living |= wanted & {*known.values()}
                is_whole &= len(unknown) <= LOOKUPS

        return living if is_whole or living == wanted else None


def _read(path: Path) -> bytes:
    """The first READ bytes of a file of the kernel; nothing if it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as opened:
        return opened.read(READ)
    return b""


def _pids(cgroup: Path) -> list[int] | None:
    """The host's PIDs in the cgroup and below; None: more than is read."""
    places = list(itertools.islice(os.walk(cgroup), CGROUPS + 1))
    text = b"\n".join(_read(Path(place, "cgroup.procs")) for place, _, _ in places)
    return None if len(places) > CGROUPS or len(text) >= READ else list(map(int, text.split()))


def _pods(tree: Path) -> dict[str, Path]:
    """The cgroups of the pods by their UIDs. Only a pod can write below its own: it is left out."""
    pods = dict[str, Path]()
    for place, names, _ in os.walk(tree):
        found = {name: match[1] for name in names if (match := POD.search(name))}
        pods |= {uid.replace("_", "-"): Path(place, name) for name, uid in found.items()}
        names[:] = [name for name in names if name not in found]
    return pods


# HAMi-core's shared regions in the container directories: read with pread, never mapped, one at a
# time and in bounded time. Any process of a container may change, replace or shorten its file.

PLACE: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
FILE: Final = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""O_NONBLOCK: an owner's lease on the file would hold up open() for 45 s."""
ENTRIES: Final = 256  # a container directory with more entries is not searched
SLOW: Final = 0.001  # seconds of CPU. A region that costs more to read is slow
COOLING: Final = 0.9  # a cheaper reading takes a tenth off the cost: being slow in turns is slow
ROUND: Final = 2.0  # seconds after which a round leaves the rest to the next
SLOW_ROUND: Final = 0.02  # the same for the slow regions, which go last: 0.4 % of a core


class HostRegions:
    """HAMi-core's shared regions below `hook`, HAMi's HOOK_PATH. All work is done on `offload`.

    A region that cannot be read is a reading with its reason, never an error. `processes`: tells
    which exist; without it nobody knows. `cpu`: the CPU seconds of the present thread.
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
        # The CPU seconds of reading each region, and the loop time of the last reading.
        self._costs: dict[str, tuple[float, float]] = {}

    async def read(self, names: Sequence[str]) -> Mapping[str, RegionSums]:
        """Read the regions of these container directories. Raises StateError."""
        return await self._offload.call(self._read, tuple(names), asyncio.get_running_loop().time)

    async def held(self) -> Sequence[str]:
        """All container directories whose region holds launches back. Raises StateError."""
        return await self._offload.call(self._held)

    async def write(self, changes: Mapping[str, RegionChange]) -> Mapping[str, str]:
        """Write each change; return why not for each that was not written. Raises StateError."""
        return await self._offload.call(self._write, dict(changes))

    def _read(self, names: Sequence[str], now: Callable[[], float]) -> Mapping[str, RegionSums]:
        end, sums = now() + ROUND, dict[str, RegionSums]()
        costs = self._costs = {name: self._costs.get(name, (0.0, -math.inf)) for name in names}
        if self._processes is not None:
            self._processes.begin(names)

        def order(name: str) -> tuple[bool, float]:
            # Slow regions go last. Of the others, those go first that the last round did not reach.
            cost, read_at = costs[name]
            return cost > SLOW, read_at

        with open_containers(self._hook) as containers:
            for name in sorted(names, key=order):
                cost, _ = costs[name]
                if cost > SLOW:
                    end = min(end, now() + SLOW_ROUND)
                if now() > end:
                    sums[name] = NoRegion("this round had no time for it").sums
                else:
                    begun = self._cpu()
                    sums[name] = self._summed(containers, name)
                    costs[name] = max(self._cpu() - begun, COOLING * cost), now()
        return sums

    def _summed(self, containers: int | None, name: str) -> RegionSums:
        try:
            with _opened(containers, name, os.O_RDONLY) as (file, size):
                region = read_region(size, functools.partial(os.pread, file))
        except NoRegion as error:
            return error.sums

        pids = frozenset(process.pid for process in region.processes)
        return region.sums(self._processes.alive(name, pids) if self._processes and pids else None)

    def _held(self) -> Sequence[str]:
        held = list[str]()
        with open_containers(self._hook) as containers:
            for name in names_in(containers):
                # By one word: nothing bounds what a tenant makes reading all slots of all cost.
                with (
                    contextlib.suppress(NoRegion),
                    _opened(containers, name, os.O_RDONLY) as (file, size),
                ):
                    offsets = recognise(size, os.pread(file, HEAD_SIZE, 0))
                    recent_kernel = os.pread(file, 4, offsets.tail + 8)
                    if int.from_bytes(recent_kernel, "little", signed=True) < 0:
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
            region = _region_name(directory)
            place = open_in(open_files, region, directory, PLACE)
            status = os.fstat(place)
            # A file of another container that is linked here has two names, or one once the link is
            # replaced: then the name that was opened is gone. A rename counts names down before it
            # takes the name away, and a look into the directory waits for its end.
            with os.scandir(directory) as entries:
                next(entries, None)
            is_gone = str(Path(f"/proc/self/fd/{place}").readlink()).endswith(" (deleted)")
            if is_gone or status.st_nlink != 1 or not stat.S_ISREG(status.st_mode):
                raise NoRegion("it is not a regular file with one name")

            # This path names the inode that was checked, whatever has its name now.
            file = open_in(open_files, f"/proc/self/fd/{place}", None, access | FILE)
            yield file, status.st_size
        except FileNotFoundError:
            raise NoRegion(state=RegionState.ABSENT) from None
        except OSError as error:
            raise NoRegion(f"it or its directory cannot be used: {error.strerror}") from error


def _region_name(directory: int) -> str:
    """Choose the region as HAMi's monitor does (cudevshr.go, loadCache). Raises NoRegion."""
    with os.scandir(directory) as entries:
        names = [entry.name for entry in itertools.islice(entries, ENTRIES + 1)]

    if len(names) > ENTRIES:
        raise NoRegion(f"its directory has more than {ENTRIES} entries")
    regions = (name for name in names if name.endswith(".cache") and "libvgpu.so" not in name)
    return min(regions, default="")  # the empty name is never found


# What a region says of the use, as far as it is believable.

MOST_MIB: Final = 1 << 20  # more memory than a GPU can have whose size is not known
MOST_AT_ONCE: Final = 16  # processes that count with 100 percent each: their samples are summed


class ContainerUse(msgspec.Struct, frozen=True):
    """The use of a container's GPUs at one time. The uuids are those of `use_of`.

    - `last_kernel`: None: not known. `processes`: how many live ones use the region.
    - `reason`: why nothing is known, as in RegionSums; empty otherwise.
    """

    at: dt.datetime
    state: RegionState
    gpus: tuple[RegionGpu, ...] = ()
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
    """The use that a region says, of the GPUs that the container was `given`, in CUDA's order.

    If the region names others, its GPUs count by position. Empty: it is not known which.
    """
    region = sums.region
    if region is None:
        return ContainerUse(at, sums.state, reason=sums.reason)

    uuids: Sequence[str] = [gpu.uuid for gpu in region.gpus]
    if given and not (len({*uuids}) == len(uuids) and {*uuids} <= {*given}):
        uuids = tuple(dict.fromkeys(given))  # by position; GPUs beyond these have none

    gpus = (
        msgspec.structs.replace(gpu, uuid=uuid)
        for gpu, uuid in zip(region.gpus, uuids, strict=False)
    )
    return ContainerUse(at, sums.state, tuple(gpus), region.last_kernel, sums.processes)


def believed(use: ContainerUse, row: Row, registered: Mapping[GpuUuid, int]) -> ContainerUse:
    """The use; or, if a GPU cannot be used that much, an unreadable one with that reason."""
    percent = 100 * min(use.processes, MOST_AT_ONCE)
    for gpu in use.gpus:
        # Memory that was promised before the settings made the GPU smaller counts as well.
        promised = [share.memory_mib for share in row.limits if share.uuid == gpu.uuid]
        mib = max((registered.get(GpuUuid(gpu.uuid)) or MOST_MIB, *promised))
        used_mib = max(*gpu.memory, gpu.memory_limit) // MIB
        if used_mib > mib or gpu.sm_percent > percent:
            said = f"it says {used_mib:,} MiB and {gpu.sm_percent:,} % of compute of a GPU"
            reason = f"not believable: {said} with at most {mib:,} MiB and {percent:,} %"
            return ContainerUse(use.at, RegionState.UNREADABLE, reason=reason)

    return use


# Decides which containers are limited and held back while others use the same GPUs: the feedback
# loop of HAMi's vGPUmonitor with the same results for equal inputs. Source: HAMi v2.10
# cmd/vGPUmonitor/feedback.go, CheckBlocking, CheckPriority and Observe. What differs:
#
# - HAMi only counts recent_kernel. From HAMi-core 2.8.1 on, a container that is not limited never
#   sets it, so two containers that start one after the other are never limited. Here the time of
#   the last kernel and the use of SMs count too; CUDA graphs show only in the latter.
# - A new process also sets the time of the last kernel, for example nvidia-smi in a probe. So that
#   time limits others to their shares, but does not hold them back.
# - GPUs and priority come from the row. A region can only give up some of its priority.

ACTIVE_FOR: Final = dt.timedelta(seconds=10)  # after a container's last kernel, or use of an SM
HIGHEST_RECENT: Final = 5  # counted down from here. HAMi-core sets 2; any process can set more


class RegionUser(msgspec.Struct, frozen=True):
    """A container with a readable region. `last_work`: when it last used an SM, if known."""

    row: Row
    region: Region
    last_work: dt.datetime | None = None

    @property
    def priority(self) -> int:
        """A smaller number goes first; below 0: apart from the others."""
        return max(self.region.priority, self.row.priority)

    @property
    def recent_kernel(self) -> int:
        """The recent_kernel after this round, unless launches are held or released."""
        recent = min(self.region.recent_kernel, HIGHEST_RECENT)
        return recent - 1 if recent > 0 else recent


def uses_sm(sums: RegionSums, now: dt.datetime) -> bool:
    """Whether a live process of the container uses an SM."""
    if sums.region is None or not any(gpu.sm_percent for gpu in sums.region.gpus):
        return False
    # The number of a dead process stays until another one starts or looks. So where it is not known
    # who lives, a kernel must have run lately too.
    return sums.knows_living or _is_recent(sums.region.last_kernel, now)


def feedback(
    users: Mapping[str, RegionUser], now: dt.datetime
) -> tuple[dict[str, RegionChange], dict[str, RegionChange]]:
    """One round over all containers with a readable region, by directory.

    - A container is held back while one of a smaller priority works on one of its GPUs: a kernel
      ran in this round, or it used an SM within ACTIVE_FOR.
    - It is limited while it is held back, or while more than one of its own priority is active on
      one of its GPUs: it works, or there was a kernel or a new process within ACTIVE_FOR.

    Returns what to write now, and what to write so that nobody is held back or limited any more.
    """
    # How many are active by GPU and priority, and the smallest priority that works on each GPU.
    active, working = Counter[tuple[GpuUuid, int]](), dict[GpuUuid, int]()
    for user in users.values():
        is_working = user.recent_kernel > 0 or _is_recent(user.last_work, now)
        is_active = is_working or _is_recent(user.region.last_kernel, now)
        for gpu in {*user.row.gpus} if user.priority >= 0 else ():
            if is_active:
                active[gpu, user.priority] += 1
            if is_working:
                working[gpu] = min(user.priority, working.get(gpu, user.priority))

    changes, release = dict[str, RegionChange](), dict[str, RegionChange]()
    for name, user in users.items():
        gpus, region, priority = user.row.gpus, user.region, user.priority
        is_held = any(working.get(gpu, priority) < priority for gpu in gpus)
        is_limited = is_held or any(active[gpu, priority] > 1 for gpu in gpus)
        if is_limited:
            release[name] = RegionChange(False, 0 if is_held else None)

        # HAMi-core holds launches back while it is below 0.
        recent = min(region.recent_kernel, -1) if is_held else max(user.recent_kernel, 0)
        change = RegionChange(
            is_limited if is_limited != region.is_limiting else None,
            recent if recent != region.recent_kernel else None,
        )
        if change != RegionChange():
            changes[name] = change

    return changes, release


def _is_recent(moment: dt.datetime | None, now: dt.datetime) -> bool:
    """Whether it was within ACTIVE_FOR. A time that far ahead says nothing: a clock was set."""
    return moment is not None and abs(now - moment) <= ACTIVE_FOR


# Samples what each container uses of its GPUs, and switches the limits of those that share one.

PERIOD: Final = 5.0  # seconds between two rounds
TURN: Final = 1  # see agent.kit.timing
DEADLINE: Final = 3.0  # seconds for reading all regions
WRITE_DEADLINE: Final = 1.0  # seconds for writing into them, also at the end
FRESH: Final = 2 * PERIOD + DEADLINE  # seconds for which a round counts as the present use


@dataclasses.dataclass(eq=False)
class ContainerUsage:
    """Reads the regions of all rows that have a directory, and writes into them.

    `observes`: write nothing. Otherwise the first round releases all that an earlier process held
    back, also without a row. `switches`: also hold back and limit containers. All are released when
    run() ends, and while they or all regions cannot be read.
    """

    regions: HostRegions
    ledger: Cell[Ledger]
    pods: Cell[PodTable]
    inventory: Cell[Inventory]
    clock: Clock
    switches: bool
    observes: bool = False

    def __post_init__(self) -> None:
        self._is_first = not self.observes
        self._uses: Mapping[ContainerKey, ContainerUse] = {}
        self._read_at = -FRESH
        # By directory: when a container last used an SM; what to write so that nobody is held back
        # or limited any more.
        self._last_work: Mapping[str, dt.datetime | None] = {}
        self._release: Mapping[str, RegionChange] = {}
        self._troubles: dict[str, str] = {}

    def newest(self, key: ContainerKey) -> ContainerUse | None:
        """The use of a container's GPUs now; None: it has no directory, or nothing was read yet."""
        return None if self._is_stale() else self._uses.get(key)

    async def run(self) -> NoReturn:
        """Read all regions at each tick of PERIOD, for ever."""
        try:
            while True:
                await self._round()
                await asyncio.sleep(until_tick(PERIOD, TURN))
        finally:
            # In a task of its own, for its deadline: see agent.kubelet.door.
            await asyncio.shield(self._write(self._release))

    async def _round(self) -> None:
        # The rows of the ledger that may have processes.
        rows = {
            row.directory: row
            for row in self.ledger.value.rows
            if row.directory and row.takes_room(self.pods.value)
        }
        try:
            async with Lag().within(DEADLINE):
                readings = await self.regions.read(tuple(rows)) if rows else {}
                left = set(await self.regions.held() if self._is_first else ())
        except (StateError, TimeoutError) as error:
            self._report("usage.unread", str(error) or f"no answer in {DEADLINE:g} s")
            if self._is_stale():
                await self._write(self._release)
            return

        self._report("usage.unread", "")
        at, self._read_at = self.clock.now(), loop_time()
        registered = {
            gpu.uuid: max(gpu.registered_mib, gpu.gpu.memory_mib or 0)
            for gpu in self.inventory.value.gpus
        }
        self._uses = {
            row.key: believed(
                use_of(readings[name], at, [share.uuid for share in row.shares]), row, registered
            )
            for name, row in rows.items()
        }

        before, switched = self._release, dict[str, RegionChange]()
        if self.switches:
            self._last_work = {
                name: at if uses_sm(sums, at) else self._last_work.get(name)
                for name, sums in readings.items()
            }
            users = {
                name: RegionUser(rows[name], sums.region, self._last_work[name])
                for name, sums in readings.items()
                if sums.region is not None
            }
            switched, self._release = feedback(users, at)

        changes = dict.fromkeys(left - self._release.keys(), RegionChange(recent_kernel=0))
        # A container that cannot be judged any more is not held back any more.
        for name in before.keys() & readings.keys():
            if readings[name].state is RegionState.UNREADABLE:
                changes[name] = before[name]
        self._is_first &= not await self._write({**changes, **switched})

    async def _write(self, changes: Mapping[str, RegionChange]) -> bool:
        """Write the changes; False if the directories as a whole take none."""
        try:
            async with asyncio.timeout(WRITE_DEADLINE):
                if changes:
                    await self.regions.write(changes)
                    self._report("usage.unwritten", "")
        except (StateError, TimeoutError) as error:
            self._report("usage.unwritten", str(error) or f"no answer in {WRITE_DEADLINE:g} s")
            return False
        return True

    def _is_stale(self) -> bool:
        return loop_time() - self._read_at > FRESH

    def _report(self, event: str, reason: str) -> None:
        """Log why all regions failed, once until the reason changes."""
        if reason and reason != self._troubles.get(event):
            log.warning(event, err=reason)
        self._troubles[event] = reason
