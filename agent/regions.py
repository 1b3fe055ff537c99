"""HAMi-core's regions: who lives in them, and reading and writing them without being led astray."""

import asyncio
import contextlib
import functools
import itertools
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent.hami.region import (
    HEAD_SIZE,
    TRUNCATED,
    NoRegion,
    Region,
    RegionChange,
    RegionState,
    RegionSums,
    count_slots,
    decode_region,
    encode_change,
    holds_back,
    recognise,
)
from agent.hookdirs import names_in, open_containers, open_in
from agent.kit.tasks import Offload
from agent.ledger import DIRECTORY_NAME

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
RETRIES: Final = 2
"""Further reads of the slots, if they are FEW, while a process is writing one of them."""
FEW: Final = 64

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

        # Slow regions go last. Of the others, those go first that the last round did not reach.
        queue = sorted(names, key=lambda name: (costs[name].seconds > SLOW, costs[name].at))
        if self._processes is not None:
            self._processes.begin(names)

        with open_containers(self._hook) as containers:
            for name in queue:
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
    """Read a region of `size` bytes, the slots again while a process is writing one.

    `pread`: read so many bytes at an offset; fewer, where the file ends. Its errors pass.

    Raises NoRegion.
    """
    head = pread(HEAD_SIZE, 0)
    offsets = recognise(size, head)
    left = RETRIES
    while True:
        tail = pread(offsets.tail_size, offsets.tail)
        if len(tail) < offsets.tail_size:
            raise NoRegion(TRUNCATED)

        length = count_slots(tail) * offsets.slot_size
        first = pread(length, offsets.slots)
        second = pread(length, offsets.slots) if offsets.seqlock else first
        if min(len(first), len(second)) < length:
            raise NoRegion(TRUNCATED)

        region = decode_region(offsets, head, tail, first, second)
        is_torn = any(process.torn for process in region.processes)
        if not left or not is_torn or len(region.processes) > FEW:
            return region
        left -= 1
