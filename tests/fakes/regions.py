"""Shared regions in memory: a write acts on the region, and only where there is one."""

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from agent.errors import StateError
from agent.hami.region import (
    MemoryUse,
    Region,
    RegionChange,
    RegionGpu,
    RegionProcess,
    RegionState,
    RegionSums,
)
from agent.usage import HostRegions


class RegionReading(msgspec.Struct, frozen=True):
    """A container's region as it is, or why there is none; `alive`: the PIDs that exist."""

    state: RegionState
    region: Region | None = None
    reason: str = ""
    alive: frozenset[int] | None = None

    def sums(self) -> RegionSums:
        """What the agent keeps of it."""
        if self.region is None:
            return RegionSums(self.state, reason=self.reason)
        return self.region.sums(self.alive)


ABSENT = RegionReading(RegionState.ABSENT)


class MemoryRegions(HostRegions):
    """The regions by directory; an unknown directory has none.

    Texts of a StateError: `broken` for every call, `unread` for a read, `read_only` for a write.
    `unseen`: the readings of regions that are there and are not read. `hangs`: no call returns.
    """

    def __init__(self) -> None:
        self.readings: dict[str, RegionReading] = {}
        self.reads: list[tuple[str, ...]] = []
        self.writes: list[Mapping[str, RegionChange]] = []
        self.unseen: dict[str, RegionReading] = {}
        self.broken = ""
        self.read_only = ""
        self.unread = ""
        self.hangs = False

    def put(self, name: str, region: Region, alive: frozenset[int] | None = None) -> None:
        """The container's processes left the region so."""
        self.readings[name] = RegionReading(RegionState.READABLE, region, alive=alive)

    def region(self, name: str) -> Region:
        """The present region of that directory, which must have one."""
        region = self.readings[name].region
        assert region is not None
        return region

    async def read(self, names: Sequence[str]) -> Mapping[str, RegionSums]:
        self.reads.append(tuple(names))
        await self._act(self.broken or self.unread)
        readings = self.readings | self.unseen
        return {name: readings.get(name, ABSENT).sums() for name in names}

    async def held(self) -> Sequence[str]:
        """The directories whose region holds launches back."""
        await self._act(self.broken or self.unread)
        regions = {name: reading.region for name, reading in self.readings.items()}
        return [name for name, region in regions.items() if region and region.recent_kernel < 0]

    async def write(self, changes: Mapping[str, RegionChange]) -> Mapping[str, str]:
        """Write into the regions that are there; return why not for the others."""
        self.writes.append(changes)
        await self._act(self.broken or self.read_only)
        failed = dict[str, str]()
        for name, change in changes.items():
            reading = self.readings.get(name, ABSENT)
            if reading.region is None:
                failed[name] = reading.reason or f"the region is {reading.state}"
            else:
                region = changed(reading.region, change)
                self.readings[name] = msgspec.structs.replace(reading, region=region)
        return failed

    async def _act(self, error: str) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if error:
            raise StateError(error)


def changed(region: Region, change: RegionChange) -> Region:
    """The region after that write."""
    return msgspec.structs.replace(
        region,
        is_limiting=region.is_limiting if change.is_limiting is None else change.is_limiting,
        recent_kernel=(
            region.recent_kernel if change.recent_kernel is None else change.recent_kernel
        ),
    )


def a_region(*uuids: str, **fields) -> Region:
    """A region of these GPUs with 8 GiB of each, as a new one is."""
    new = Region(
        layout="v1.2",
        gpus=tuple(RegionGpu(uuid, 2**33) for uuid in uuids),
        processes=(),
        is_limiting=True,
        recent_kernel=2,
        priority=1,
        last_kernel=None,
    )
    return msgspec.structs.replace(new, **fields)


def a_process(*memory: int, sm: int = 0, pid: int = 1) -> RegionProcess:
    """A process that uses so many bytes of each GPU and `sm` percent of each."""
    used = tuple(MemoryUse(buffer=size, total=size) for size in memory)
    return RegionProcess(pid, memory=used, sm_percent=(sm,) * len(memory))
