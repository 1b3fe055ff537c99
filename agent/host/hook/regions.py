"""HAMi-core's shared regions in the container directories: read with pread, never mapped.

Any process of a container may change, replace or shorten its file at any time. Only a regular file
with one name is opened. What costs time is bounded for each container, and for all together. One
region is in memory at a time.
"""

import asyncio
import contextlib
import functools
import itertools
import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent.codec.region import (
    HEAD_SIZE,
    TRUNCATED,
    NoRegion,
    RegionOffsets,
    count_slots,
    decode_region,
    encode_change,
    holds_back,
    recognise,
)
from agent.core.usage.region import (
    MAX_PROCESSES,
    Region,
    RegionChange,
    RegionReading,
    RegionState,
    RegionSums,
)
from agent.host.hook.path import LISTED, NAME, open_containers, open_in, state_errors
from agent.host.hook.processes import ContainerProcesses
from agent.kit.offload import Offload

PLACE: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
FILE: Final = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""O_NONBLOCK: an owner's lease on the file would hold up open() for 45 s."""
ENTRIES: Final = 256
"""A container directory with more entries is not searched."""
RETRIES: Final = 2
"""Further reads of the slots, if they are FEW, while a process is writing one of them."""
SLOW: Final = 0.001
"""Seconds of CPU that a region may cost in each round."""
FEW: Final = 64
"""A region with more slots in use is read after the others."""
SHARE: Final = 0.004
"""The part of a core that all slower regions may cost together in the long run."""
ROUND: Final = 2.0
"""Seconds after which a round leaves the rest to the next."""
SLOW_ROUND: Final = 0.02
"""The same for the slow and crowded regions, which go last: a round is 5 s, and SHARE of it."""


class CrowdedRegion(Exception):  # noqa: N818 -- a normal state, too
    """A region has more slots in use than are read before those of other regions."""


class _Cost(NamedTuple):
    """The mean CPU seconds of reading a region, and the loop time of the last reading."""

    seconds: float = 0.0
    at: float = -math.inf


class HostRegions:
    """The Regions port below `hook`, HAMi's HOOK_PATH. All work is done on `offload`.

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
        crowded = set[str]()
        if self._processes is not None:
            self._processes.begin(names)
        with self._containers() as containers:
            for name in queue:
                cost = costs[name]
                is_slow = cost.seconds > SLOW or name in crowded
                pause = cost.seconds * slow / SHARE if is_slow else 0.0
                if is_slow:
                    end = min(end, now() + SLOW_ROUND)
                if now() > end:
                    reason = "other regions took the time of this round"
                elif now() < cost.at + pause:
                    ms = round(cost.seconds * 1000)
                    reason = f"reading it takes {ms} ms of CPU, so it is read every {pause:.0f} s"
                else:
                    most = MAX_PROCESSES if is_slow else FEW
                    try:
                        sums[name], spent = self._summed(containers, name, most)
                        if spent > SLOW and not is_slow:
                            # Something else, such as a garbage collection, may have taken the time.
                            sums[name], spent = self._summed(containers, name, most)
                    except CrowdedRegion:
                        crowded.add(name)
                        queue.append(name)
                    else:
                        costs[name] = _Cost((spent + (cost.seconds or spent)) / 2, now())
                    continue
                sums[name] = RegionSums(RegionState.UNREADABLE, reason=reason)
        return sums

    def _summed(self, containers: int | None, name: str, most: int) -> tuple[RegionSums, float]:
        """Read and sum a region of at most `most` slots; also the CPU seconds that this costs.

        Raises CrowdedRegion.
        """
        begun, alive = self._cpu(), None
        try:
            with _opened(containers, name, os.O_RDONLY) as (file, size):
                region = read_region(size, functools.partial(os.pread, file), most)
            pids = frozenset(process.pid for process in region.processes)
            if self._processes and pids:
                alive = self._processes.alive(name, pids)
            reading = RegionReading(RegionState.READABLE, region, alive=alive)
        except NoRegion as error:
            reading = error.reading
        sums = reading.sums()
        return sums, self._cpu() - begun

    def _held(self) -> Sequence[str]:
        with self._containers() as containers:
            if containers is None:
                return ()
            with os.scandir(containers) as entries:
                names = [entry.name for entry in itertools.islice(entries, LISTED)]
            return [name for name in names if _holds_back(containers, name)]

    def _write(self, changes: Mapping[str, RegionChange]) -> Mapping[str, str]:
        with self._containers() as containers:
            reasons = {name: _written(containers, name, change) for name, change in changes.items()}
        return {name: reason for name, reason in reasons.items() if reason}

    @contextlib.contextmanager
    def _containers(self) -> Iterator[int | None]:
        """Open the parent of the container directories; None: there is none yet."""
        with state_errors(self._hook), contextlib.ExitStack() as open_directories:
            try:
                containers = open_containers(self._hook, open_directories)
            except FileNotFoundError:
                self._hook.stat()
                containers = None
            yield containers


def _holds_back(containers: int, name: str) -> bool:
    with contextlib.suppress(NoRegion), _opened(containers, name, os.O_RDONLY) as (file, size):
        offsets = recognise(size, os.pread(file, HEAD_SIZE, 0))
        return holds_back(os.pread(file, offsets.tail_size, offsets.tail))
    return False


def _written(containers: int | None, name: str, change: RegionChange) -> str:
    """Write the change; return why it was not written, or an empty string."""
    try:
        with _opened(containers, name, os.O_RDWR) as (file, size):
            offsets = recognise(size, os.pread(file, HEAD_SIZE, 0))
            for offset, word in encode_change(offsets, change):
                if os.fstat(file).st_size != size:
                    return TRUNCATED
                os.pwrite(file, word, offset)
    except NoRegion as error:
        return error.reading.reason or f"it is {error.reading.state}"
    return ""


@contextlib.contextmanager
def _opened(containers: int | None, name: str, access: int) -> Iterator[tuple[int, int]]:
    """Open the region of the container directory: the file and its size.

    Raises NoRegion, also for an OSError within.
    """
    with contextlib.ExitStack() as open_files:
        try:
            place, size = _place(open_files, containers, name)
            # This path names the inode that was checked, whatever has its name now.
            yield open_in(open_files, f"/proc/self/fd/{place}", None, access | FILE), size
        except FileNotFoundError:
            raise NoRegion(state=RegionState.ABSENT) from None
        except OSError as error:
            raise NoRegion(f"it or its directory cannot be used: {error.strerror}") from error


def _place(open_files: contextlib.ExitStack, containers: int | None, name: str) -> tuple[int, int]:
    """Find the region and its size without opening it: opening a device could act on it.

    Raises NoRegion, OSError.
    """
    if not NAME.fullmatch(name):
        raise NoRegion("its directory's name is not <pod UID>_<container>")
    if containers is None:
        raise FileNotFoundError
    directory = open_in(open_files, name, containers)
    place = open_in(open_files, _region_name(directory), directory, PLACE)
    status = os.fstat(place)
    if not stat.S_ISREG(status.st_mode):
        raise NoRegion("it is not a regular file")
    if status.st_nlink > 1:
        raise NoRegion(f"it has {status.st_nlink} names instead of one")
    return place, status.st_size


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


def read_region(size: int, pread: Callable[[int, int], bytes], most: int = MAX_PROCESSES) -> Region:
    """Read a region of `size` bytes, the slots again while a process is writing one.

    `pread`: read so many bytes at an offset; fewer, where the file ends. Its errors pass.

    Raises NoRegion; CrowdedRegion: more than `most` slots are in use.
    """
    head = pread(HEAD_SIZE, 0)
    offsets = recognise(size, head)
    region = _read_once(offsets, head, pread, most)
    for _ in range(RETRIES):
        if len(region.processes) > FEW or not any(process.torn for process in region.processes):
            break
        region = _read_once(offsets, head, pread, most)
    return region


def _read_once(
    offsets: RegionOffsets, head: bytes, pread: Callable[[int, int], bytes], most: int
) -> Region:
    tail = _exactly(pread, offsets.tail_size, offsets.tail)
    if count_slots(tail) > most:
        raise CrowdedRegion
    length = count_slots(tail) * offsets.slot_size
    first = _exactly(pread, length, offsets.slots)
    second = _exactly(pread, length, offsets.slots) if offsets.seqlock else first
    return decode_region(offsets, head, tail, first, second)


def _exactly(pread: Callable[[int, int], bytes], length: int, offset: int) -> bytes:
    window = pread(length, offset)
    if len(window) < length:
        raise NoRegion(TRUNCATED)
    return window
