"""HAMi-core's shared region: its layouts, its bytes and what they mean."""

import datetime as dt
import enum
import re
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

# Values. Source: HAMi-core src/multiprocess/multiprocess_memory_limit.h.

MAX_GPUS: Final = 16
MAX_PROCESSES: Final = 1024


class MemoryUse(NamedTuple):
    """Bytes of one GPU's memory, by purpose. `total` is the library's own sum.

    Of one process they can be negative: HAMi-core counts what it frees in the slot of another. A
    named tuple, because a region can have thousands of them.
    """

    context: int = 0
    module: int = 0
    buffer: int = 0
    total: int = 0


class RegionProcess(msgspec.Struct, frozen=True):
    """A slot in use. `pid`: in the container. The rest: by GPU, as many as the region has."""

    pid: int
    memory: tuple[MemoryUse, ...]
    sm_percent: tuple[int, ...]


class RegionGpu(msgspec.Struct, frozen=True):
    """One GPU of the container, in NVML's order there, and the sums over processes, once summed.

    `uuid`: empty where the library has not written it. `memory_limit`: bytes; 0: none.
    """

    uuid: str
    memory_limit: int
    memory: MemoryUse = MemoryUse()
    sm_percent: int = 0


class Region(msgspec.Struct, frozen=True):
    """One region, read whole. Counts are clamped to what the layout has room for.

    - `is_limiting`: the utilisation switch; cores are limited under the default policy.
    - `recent_kernel`: positive: kernels ran lately; negative: launches are held back.
    - `priority`: a smaller number goes first.
    - `last_kernel`: the last start of a process or a kernel; None: the layout has none, or never.
    """

    layout: str
    gpus: tuple[RegionGpu, ...]
    processes: tuple[RegionProcess, ...]
    is_limiting: bool
    recent_kernel: int
    priority: int
    last_kernel: dt.datetime | None

    def sums(self, alive: frozenset[int] | None = None) -> "RegionSums":
        """Sum over the processes whose PID is in `alive`; None: over all slots in use."""
        live = [one for one in self.processes if alive is None or one.pid in alive]
        gpus = list[RegionGpu]()
        for position, gpu in enumerate(self.gpus):
            sums = map(sum, zip(*(one.memory[position] for one in live), strict=True))
            # Only of all processes together HAMi-core's numbers cannot be negative.
            memory = MemoryUse(*(max(0, number) for number in sums))
            percent = sum(one.sm_percent[position] for one in live)
            gpus.append(RegionGpu(gpu.uuid, gpu.memory_limit, memory, percent))

        region = msgspec.structs.replace(self, gpus=tuple(gpus), processes=())
        return RegionSums(RegionState.READABLE, region, "", len(live), alive is not None)


class RegionState(enum.StrEnum):
    """What stands in a container's directory."""

    ABSENT = "absent"  # no process of the container has used CUDA or NVML yet
    INITIALISING = "initialising"
    READABLE = "readable"
    UNREADABLE = "unreadable"


class RegionSums(msgspec.Struct, frozen=True):
    """What is kept of a container's region: without its processes, and their sums.

    `reason`: why it is unreadable, one clause. `processes`: how many were summed.
    `knows_living`: False: dead ones may be among them.
    """

    state: RegionState
    region: Region | None = None
    reason: str = ""
    processes: int = 0
    knows_living: bool = False


class RegionChange(msgspec.Struct, frozen=True):
    """What to write into one region; None leaves it as it is."""

    is_limiting: bool | None = None
    recent_kernel: int | None = None


# Reads HAMi-core's shared region from windows of its bytes, and encodes what a host may write. Any
# process of the container may write anything there: every count is clamped, every text bounded.
# Source: the header at the commits of HAMi 2.4.0 to 2.10.

MAGIC: Final = 19920718  # the flag at offset 0, which the library writes last
HEAD_SIZE: Final = 1888
"""Bytes from offset 0 that hold all that is before the slots, in every layout."""
MAX_USES: Final = 2048
"""Processes times GPUs that are read: a tenant may not keep the agent busy with more."""
UUID_SIZE: Final = 96
UUID: Final = re.compile(rb"((?:(?:GPU|MIG)-[0-9A-Za-z/-]{1,91})?)\0.*", re.DOTALL)
"""A UUID or none, and the NUL after it; what follows the NUL is not cleared by the library."""
TAIL: Final = struct.Struct("<iiiiQ")
TRUNCATED: Final = "it became shorter while it was read"
_LATEST: Final = int(dt.datetime.max.replace(tzinfo=dt.UTC).timestamp())


class RegionOffsets:
    """Where the fields of one layout are, in bytes. All numbers are little-endian.

    - `layout`: v0, v1.1, v1.1s or v1.2. Only HAMi 2.8.1 writes v1.1s: a second semaphore moves
      every later field.
    - `version`: the words at offsets 4 and 8; None: the layout has none.
    - `size`: of the struct; libvgpu.so makes the file one byte longer.
    - `gpu_count`: of the number of GPUs, a u64.
    - `tail`: of the process count, utilisation switch, recent_kernel and priority. Except in v0,
      the time of the last kernel follows.
    - `slot_size`: of one slot; `used`, `utilisation` and `status` are offsets in it;
      `memory_size`, `utilisation_size`: of one GPU's part. `slot` has four of them.

    Tests compare all of them with offsetof() of HAMi-core's compiled structs.
    """

    def __init__(
        self,
        layout: str,
        version: tuple[int, int] | None,
        size: int,
        gpu_count: int,
        slot: tuple[int, int, int, int],
    ) -> None:
        self.layout, self.version, self.size, self.gpu_count = layout, version, size, gpu_count
        self.slot_size, self.used, self.memory_size, self.utilisation_size = slot
        self.uuids = gpu_count + 8
        self.memory_limits = self.uuids + MAX_GPUS * UUID_SIZE
        self.slots = self.memory_limits + 2 * MAX_GPUS * 8  # after the limits of the cores
        self.tail = self.slots + MAX_PROCESSES * self.slot_size
        # Between them is the memory that NVML reports of the process; the agent does not read it.
        self.utilisation = self.used + MAX_GPUS * (self.memory_size + 8)
        self.status = self.utilisation + MAX_GPUS * self.utilisation_size


V0: Final = RegionOffsets("v0", None, 1197896, 48, (1168, 8, 40, 24))
V1_1: Final = RegionOffsets("v1.1", (1, 1), 2008952, 56, (1960, 8, 64, 48))
V1_1S: Final = RegionOffsets("v1.1s", (1, 1), 2008984, 88, (1960, 16, 64, 48))
V1_2: Final = RegionOffsets("v1.2", (1, 2), 2008952, 56, (1960, 8, 64, 48))
LAYOUTS: Final = (V0, V1_1, V1_1S, V1_2)


class NoRegion(Exception):  # noqa: N818 -- a normal state, too
    """A file is not a region that can be read; `sums` is the result for it."""

    def __init__(self, reason: str = "", state: RegionState = RegionState.UNREADABLE) -> None:
        super().__init__(reason)
        self.sums = RegionSums(state, reason=reason)


def recognise(size: int, head: bytes) -> RegionOffsets:
    """Tell the layout from the file's size and its first HEAD_SIZE bytes. Raises NoRegion.

    A size must fit exactly: a truncated v1 region would pass for v0.
    """
    sized = [offsets for offsets in LAYOUTS if size - offsets.size in (0, 1)]
    if sized and len(head) < HEAD_SIZE:
        raise NoRegion(TRUNCATED)

    magic, *version = struct.unpack_from("<iII", head) if sized else (None, 0, 0)
    if size == 0 or magic == 0:
        raise NoRegion(state=RegionState.INITIALISING)

    for offsets in sized:
        # Another layout of the same size has other bytes where this one has UUIDs.
        if magic == MAGIC and offsets.version in (None, tuple(version)) and _uuids(offsets, head):
            return offsets

    raise NoRegion(f"no layout of HAMi-core has its size of {size} bytes and its first fields")


def _uuids(offsets: RegionOffsets, head: bytes) -> list[str]:
    """The UUID of each of the 16 GPUs; none at all if one of the fields is no UUID."""
    places = range(offsets.uuids, offsets.memory_limits, UUID_SIZE)
    found = [UUID.fullmatch(head, at, at + UUID_SIZE) for at in places]
    return [match[1].decode("ascii") for match in found if match] if all(found) else []


def read_region(size: int, pread: Callable[[int, int], bytes]) -> Region:
    """Read a region of `size` bytes. Raises NoRegion.

    `pread`: read so many bytes at an offset; fewer, where the file ends. Its errors pass.

    HAMi-core changes a slot word by word, without a lock from 2.8.1 on. Each word is whole, and the
    next reading has those that came after it, so the seqlock is not asked.
    """
    head = pread(HEAD_SIZE, 0)
    offsets = recognise(size, head)
    tail_size = min(TAIL.size, offsets.size - offsets.tail)  # v0 has no time of the last kernel
    tail = pread(tail_size, offsets.tail)
    slot_count, switch, recent_kernel, priority, seconds = TAIL.unpack(tail.ljust(TAIL.size, b"\0"))
    length = max(0, min(slot_count, MAX_PROCESSES)) * offsets.slot_size
    slots = pread(length, offsets.slots)
    if len(tail) < tail_size or len(slots) < length:
        raise NoRegion(TRUNCATED)

    # The slots that a process has: one that ended has no PID, or the status 0.
    rest = offsets.slot_size - offsets.status - 4
    heads = struct.iter_unpack(f"<i{offsets.status - 4}xi{rest}x", slots)
    live = [slot for slot, (pid, status) in enumerate(heads) if pid > 0 and status != 0]

    (count,) = struct.unpack_from("<Q", head, offsets.gpu_count)
    count = min(count, MAX_GPUS)
    if len(live) * count > MAX_USES:
        raise NoRegion(f"{len(live)} processes on {count} GPUs are more than are read")

    memory = struct.unpack_from(f"<{count}Q", head, offsets.memory_limits)
    uuids = _uuids(offsets, head)[:count]
    is_time = 0 < seconds <= _LATEST
    return Region(
        layout=offsets.layout,
        gpus=tuple(map(RegionGpu, uuids, memory)),
        processes=tuple(_process(offsets, slots, slot, count) for slot in live),
        is_limiting=switch != 0,
        recent_kernel=recent_kernel,
        priority=priority,
        last_kernel=dt.datetime.fromtimestamp(seconds, dt.UTC) if is_time else None,
    )


def _process(offsets: RegionOffsets, slots: bytes, slot: int, count: int) -> RegionProcess:
    start = slot * offsets.slot_size
    (pid,) = struct.unpack_from("<i", slots, start)
    # context, module, data, offset (never written), total
    # Signed: HAMi-core 2.8.1 and later can take from a slot what another process had added.
    each = f"qqq8xq{offsets.memory_size - 40}x"
    used = struct.unpack_from("<" + each * count, slots, start + offsets.used)
    # decoder and encoder (never written), SMs
    each = f"16xQ{offsets.utilisation_size - 24}x"
    return RegionProcess(
        pid=pid,
        memory=tuple(map(MemoryUse, used[0::4], used[1::4], used[2::4], used[3::4])),
        sm_percent=struct.unpack_from("<" + each * count, slots, start + offsets.utilisation),
    )


def encode_change(offsets: RegionOffsets, change: RegionChange) -> tuple[tuple[int, bytes], ...]:
    """The aligned words to write, each with its offset."""
    words = ((4, change.is_limiting), (8, change.recent_kernel))
    return tuple(
        (offsets.tail + at, struct.pack("<i", word)) for at, word in words if word is not None
    )
