"""HAMi-core's shared regions in the container directories: read with pread, never mapped.

Any process of a container may change, replace or shorten its file at any time. Only a regular file
with one name is opened. What costs time is bounded for each container.
"""

import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent.codec.region import (
    HEAD_SIZE,
    TRUNCATED,
    NoRegion,
    RegionOffsets,
    count_slots,
    decode_region,
    encode_change,
    recognise,
)
from agent.core.usage.region import Region, RegionChange, RegionReading, RegionState
from agent.host.hook.path import NAME, open_containers, open_in, state_errors
from agent.host.hook.processes import ContainerProcesses
from agent.kit.offload import Offload

PLACE: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
FILE: Final = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""O_NONBLOCK: an owner's lease on the file would hold up open() for 45 s."""
ENTRIES: Final = 256
"""A container directory with more entries is not searched."""
RETRIES: Final = 2
"""Further reads of the slots while a process is writing one of them."""


class HostRegions:
    """The Regions port below `hook`, HAMi's HOOK_PATH. All work is done on `offload`.

    `processes`: tells which processes exist; without it nobody knows.
    """

    def __init__(
        self, hook: Path, offload: Offload, processes: ContainerProcesses | None = None
    ) -> None:
        self._hook = hook
        self._offload = offload
        self._processes = processes

    async def read(self, names: Sequence[str]) -> Mapping[str, RegionReading]:
        """Read the regions of these container directories. Raises StateError."""
        return await self._offload.call(self._read, tuple(names))

    async def write(self, changes: Mapping[str, RegionChange]) -> Mapping[str, str]:
        """Write each change; return why not for each that was not written. Raises StateError."""
        return await self._offload.call(self._write, dict(changes))

    def _read(self, names: Sequence[str]) -> Mapping[str, RegionReading]:
        with self._containers() as containers:
            readings = {name: _reading(containers, name) for name in names}
        if self._processes is None:
            return readings
        pids = {
            name: frozenset(process.pid for process in reading.region.processes)
            for name, reading in readings.items()
            if reading.region is not None and reading.region.processes
        }
        for name, living in self._processes.alive(pids).items():
            readings[name] = msgspec.structs.replace(readings[name], alive=living)
        return readings

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


def _reading(containers: int | None, name: str) -> RegionReading:
    try:
        with _opened(containers, name, os.O_RDONLY) as (file, size):
            region = read_region(size, lambda length, offset: os.pread(file, length, offset))
            return RegionReading(RegionState.READABLE, region)
    except NoRegion as error:
        return error.reading


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


def read_region(size: int, pread: Callable[[int, int], bytes]) -> Region:
    """Read a region of `size` bytes, the slots again while a process is writing one.

    `pread`: read so many bytes at an offset; fewer, where the file ends. Its errors pass.

    Raises NoRegion.
    """
    head = pread(HEAD_SIZE, 0)
    offsets = recognise(size, head)
    region = _read_once(offsets, head, pread)
    for _ in range(RETRIES):
        if not any(process.torn for process in region.processes):
            break
        region = _read_once(offsets, head, pread)
    return region


def _read_once(offsets: RegionOffsets, head: bytes, pread: Callable[[int, int], bytes]) -> Region:
    tail = _exactly(pread, offsets.tail_size, offsets.tail)
    length = count_slots(tail) * offsets.slot_size
    first = _exactly(pread, length, offsets.slots)
    second = _exactly(pread, length, offsets.slots) if offsets.seqlock else first
    return decode_region(offsets, head, tail, first, second)


def _exactly(pread: Callable[[int, int], bytes], length: int, offset: int) -> bytes:
    window = pread(length, offset)
    if len(window) < length:
        raise NoRegion(TRUNCATED)
    return window
