"""Values: the shared region of HAMi-core's libvgpu.so in one container.

Source: HAMi-core src/multiprocess/multiprocess_memory_limit.h.
"""

import datetime as dt
import enum
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

MAX_GPUS: Final = 16
MAX_PROCESSES: Final = 1024


class RegionLayout(enum.StrEnum):
    """The layouts that HAMi-core's releases write."""

    V0 = "v0"
    V1_1 = "v1.1"
    V1_1S = "v1.1s"
    """HAMi 2.8.1 only: a second semaphore moves every later field."""
    V1_2 = "v1.2"


class MemoryUse(NamedTuple):
    """Bytes of one GPU's memory, by purpose. `total` is the library's own sum.

    Of one process they can be negative: HAMi-core counts what it frees in the slot of another.

    A named tuple, because a region can have thousands of them and is read every few seconds.
    """

    context: int = 0
    module: int = 0
    buffer: int = 0
    total: int = 0


class RegionProcess(msgspec.Struct, frozen=True):
    """One slot in use. `memory` and `sm_percent`: by GPU, as many as the region has GPUs.

    - `slot`: its position in the region.
    - `pid`: in the container's PID namespace; `host_pid`: as the library believes, 0: not known.
    - `suspended`: it waits for SIGUSR1 (status 2).
    - `torn`: its writer was in the middle of a change at each read; the numbers may be old.
    """

    slot: int
    pid: int
    host_pid: int
    memory: tuple[MemoryUse, ...]
    sm_percent: tuple[int, ...]
    suspended: bool = False
    torn: bool = False


class RegionGpu(msgspec.Struct, frozen=True):
    """One GPU of the container. `index`: by NVML's order in the container, see `cuda_order`.

    - `uuid`: empty where the library has not written it.
    - `memory_limit`: bytes; 0: none. `core_limit`: percent; 100 or more: none.
    """

    index: int
    uuid: str
    memory_limit: int
    core_limit: int


class Region(msgspec.Struct, frozen=True):
    """One region, read whole. Counts are clamped to what the layout has room for.

    - `is_limiting`: the utilisation switch; cores are limited under the default policy.
    - `recent_kernel`: positive: kernels ran lately; negative: launches are held back.
    - `priority`: a smaller number goes first.
    - `last_kernel`: the last start of a process or a kernel; None: the layout has none, or never.
    """

    layout: RegionLayout
    gpus: tuple[RegionGpu, ...]
    processes: tuple[RegionProcess, ...]
    is_limiting: bool
    recent_kernel: int
    priority: int
    last_kernel: dt.datetime | None


class RegionState(enum.StrEnum):
    """What stands in a container's directory."""

    ABSENT = "absent"
    """No process of the container has used CUDA or NVML yet."""
    INITIALISING = "initialising"
    READABLE = "readable"
    UNREADABLE = "unreadable"


class RegionReading(msgspec.Struct, frozen=True):
    """The result of reading one container's region. `reason`: why it is unreadable, one clause.

    `alive`: of the processes, those whose PID still exists; None: that is not known here.
    """

    state: RegionState
    region: Region | None = None
    reason: str = ""
    alive: frozenset[int] | None = None

    def sums(self) -> "RegionSums":
        """Sum over the live processes; without `alive` all slots in use count."""
        region = self.region
        if region is None:
            return RegionSums(self.state, reason=self.reason)
        live = [one for one in region.processes if self.alive is None or one.pid in self.alive]
        positions = range(len(region.gpus))
        return RegionSums(
            self.state,
            msgspec.structs.replace(region, processes=()),
            memory=tuple(_sum(one.memory[position] for one in live) for position in positions),
            sm_percent=tuple(
                sum(one.sm_percent[position] for one in live) for position in positions
            ),
            processes=len(live),
            knows_living=self.alive is not None,
        )


class RegionSums(msgspec.Struct, frozen=True):
    """What is kept of a reading: `region` without its processes, and the sums over the live ones.

    - `memory`, `sm_percent`: by GPU, as many as the region has GPUs.
    - `processes`: how many were summed. `knows_living`: False: dead ones may be among them.
    """

    state: RegionState
    region: Region | None = None
    reason: str = ""
    memory: tuple[MemoryUse, ...] = ()
    sm_percent: tuple[int, ...] = ()
    processes: int = 0
    knows_living: bool = False


def _sum(parts: Iterable[MemoryUse]) -> MemoryUse:
    """The sum over processes. Only of all together HAMi-core's numbers cannot be negative."""
    sums = map(sum, zip(*parts, strict=True))
    return MemoryUse(*(max(0, number) for number in sums))


class RegionChange(msgspec.Struct, frozen=True):
    """What to write into one region; None leaves it as it is."""

    is_limiting: bool | None = None
    recent_kernel: int | None = None
