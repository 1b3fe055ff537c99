"""A model of libvgpu.so, as far as the region of one container shows it.

It writes the same bytes as HAMi-core's own code, in the order that matters to a reader.
Source: HAMi-core src/multiprocess/multiprocess_memory_limit.c and
multiprocess_utilization_watcher.c at the commit that HAMi 2.9.0 pins. Older libraries have other
layouts, which agent/hami/region.py reads; files that they wrote are its vectors.
"""

import datetime as dt
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from agent.hami.region import MAGIC, MAX_GPUS, MAX_PROCESSES, UUID_SIZE, V1_2

MEMORY_LIMIT: Final = "CUDA_DEVICE_MEMORY_LIMIT"
CORE_LIMIT: Final = "CUDA_DEVICE_SM_LIMIT"
PRIORITY: Final = "CUDA_TASK_PRIORITY"
POLICY: Final = "GPU_CORE_UTILIZATION_POLICY"
UNLIMITED: Final = 100
"""Percent of compute from which on there is no limit."""
SWEEP: Final = 10
"""Slots of killed processes that one start removes at most."""
SEMAPHORES: Final = (24, 2008920)
SEQLOCK: Final = 1936
"""The offset in a slot."""
_UNITS: Final = {"K": 10, "M": 20, "G": 30}
_NUMBER: Final = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")
_PURPOSES: Final = {"context": 0, "module": 8, "data": 16}
_TOTAL: Final = 32
CORE_LIMITS: Final = 8 * MAX_GPUS
"""From the memory limits to the limits of the cores."""


def limit_of(text: str) -> int:
    """The limit that a variable's text means; 0: none.

    The unit is the last character, so that `8Gi` is 8 bytes. Source: get_limit_from_env.
    """
    found = _NUMBER.match(text)
    if found is None:
        return 0
    sign, digits = found.groups()
    base = 16 if digits[:2].lower() == "0x" else 8 if digits[0] == "0" else 10
    number = min(int(digits, base), (1 << 64) - 1)
    limit = ((-number if sign == "-" else number) % (1 << 64)) << _UNITS.get(text[-1].upper(), 0)
    return limit if limit < 1 << 64 else 0


class HamiCoreRegion:
    """The region at `path`, for the processes of one container."""

    offsets: Final = V1_2

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, environment: Mapping[str, str]) -> None:
        """Make the region with the limits of the environment, unless it exists."""
        offsets = self.offsets
        with self.path.open("a+b"):
            self.path.chmod(0o666)
        if self.path.stat().st_size:
            return
        self.put(offsets.size, "B", 0)
        self.put(4, "II", *(offsets.version or ()))
        limits = [_limit(environment, MEMORY_LIMIT, i) for i in range(MAX_GPUS)]
        self.put(offsets.memory_limits, "16Q", *limits)
        limits = [_limit(environment, CORE_LIMIT, i) or 100 for i in range(MAX_GPUS)]
        self.put(offsets.memory_limits + CORE_LIMITS, "16Q", *limits)
        for semaphore in SEMAPHORES:
            self.put(semaphore, "III", 1, 0, 0x80)
        priority = re.match(r"\s*[+-]?\d+", environment.get(PRIORITY, "1"))
        self.put(offsets.tail, "iiii", 0, 1, 2, int(priority.group()) if priority else 0)
        self.put(0, "i", MAGIC)

    def name_gpus(self, uuids: Sequence[str]) -> None:
        """Write the GPUs, as the first nvmlInit of a process does."""
        for index, uuid in enumerate(uuids):
            self.put(self.offsets.uuids + index * UUID_SIZE, f"{UUID_SIZE}s", uuid.encode())
        self.put(self.offsets.gpu_count, "Q", len(uuids))

    def start(
        self, pid: int, environment: Mapping[str, str], now: dt.datetime, dead: Collection[int] = ()
    ) -> "HamiCoreProcess":
        """Begin a process, which takes a slot and removes those of the `dead`.

        `pid`: in the container. Raises RuntimeError if there is no slot left: the process exits.
        """
        self.create(environment)
        self.put(self.offsets.tail + 16, "Q", int(now.timestamp()))
        pids = self.pids()
        if pid not in pids:
            if len(pids) == MAX_PROCESSES:
                raise RuntimeError("The region has no slot left: HAMi-core ends the process.")
            self.put(self.offsets.tail, "i", len(pids) + 1)
        slot = self._slot(pids.index(pid) if pid in pids else len(pids))
        self.put(slot + self.offsets.used, f"{MAX_GPUS * self.offsets.memory_size}x")
        self.put(slot + self.offsets.utilisation, f"{MAX_GPUS * self.offsets.utilisation_size}x")
        self.put(slot, "i", pid)
        self.put(slot + self.offsets.status, "i", 1)
        self.sweep({0, *dead})
        return HamiCoreProcess(self, pid, environment.get(POLICY, ""))

    def sweep(self, dead: Collection[int]) -> None:
        """Remove slots of these PIDs: the last slot takes the place, and its own bytes stay."""
        index = removed = 0
        while index < len(pids := self.pids()):
            if pids[index] not in dead or removed == SWEEP:
                index += 1
                continue
            last = self._bytes(self._slot(len(pids) - 1), self.offsets.slot_size)
            self.put(self._slot(index), f"{len(last)}s", last)
            self.put(self.offsets.tail, "i", len(pids) - 1)
            removed += pids[index] != 0

    def pids(self) -> list[int]:
        """The PIDs of the slots that count."""
        count = self.get(self.offsets.tail, "i")
        return [self.get(self._slot(index), "i") for index in range(count)]

    def slot_of(self, pid: int) -> int:
        """The offset of the slot that the process has."""
        return self._slot(self.pids().index(pid))

    def get(self, offset: int, form: str) -> int:
        """Read one number."""
        number: int = struct.unpack(f"<{form}", self._bytes(offset, struct.calcsize(f"<{form}")))[0]
        return number

    def put(self, offset: int, form: str, *values: int | bytes) -> None:
        """Write fields; the file grows to hold them."""
        with self.path.open("r+b") as region:
            region.seek(offset)
            region.write(struct.pack(f"<{form}", *values))

    def _slot(self, index: int) -> int:
        return self.offsets.slots + index * self.offsets.slot_size

    def _bytes(self, offset: int, size: int) -> bytes:
        with self.path.open("rb") as region:
            region.seek(offset)
            return region.read(size)


class HamiCoreProcess:
    """A process of the container that uses CUDA. One that is killed is simply used no more.

    It keeps the place of its slot: it never notices that another moved the slot.
    """

    def __init__(self, region: HamiCoreRegion, pid: int, policy: str) -> None:
        self._region = region
        self._offsets = region.offsets
        self._policy = policy.lower() if policy in (policy.lower(), policy.upper()) else ""
        self._slot = region.slot_of(pid)
        self.pid = pid

    @property
    def _found(self) -> int:
        """The first slot with its PID."""
        return self._region.slot_of(self.pid)

    def find_host_pid(self, host_pid: int) -> None:
        """Write the PID on the host, which cuInit guesses from NVML's list."""
        self._region.put(self._found + 4, "i", host_pid)

    def allocate(self, gpu: int, size: int, purpose: str = "data") -> None:
        """Add bytes to the use of the GPU; a negative size frees them."""
        region, offsets = self._region, self._offsets
        used = self._slot + offsets.used + gpu * offsets.memory_size
        self._lock()
        for field in (_PURPOSES[purpose], _TOTAL):
            region.put(used + field, "Q", region.get(used + field, "Q") + size)
        self._lock()

    def _lock(self) -> None:
        """Make the seqlock odd, or even again."""
        seqlock = self._slot + SEQLOCK
        self._region.put(seqlock, "Q", self._region.get(seqlock, "Q") + 1)

    def die_while_writing(self, gpu: int, size: int) -> None:
        """Add to the use, and be killed before the sum is written."""
        self._lock()
        used = self._slot + self._offsets.used + gpu * self._offsets.memory_size
        self._region.put(used + _PURPOSES["data"], "Q", size)

    def watch(self, gpu: int, sm_percent: int, memory: int = 0) -> None:
        """Write what NVML reports of the process, as the watcher's thread does."""
        offsets = self._offsets
        monitored = self._found + offsets.used + MAX_GPUS * offsets.memory_size
        self._region.put(monitored + 8 * gpu, "Q", memory)
        utilisation = self._found + offsets.utilisation + gpu * offsets.utilisation_size
        self._region.put(utilisation + 16, "Q", sm_percent)

    def launch(self, now: dt.datetime, gpu: int = 0) -> bool:
        """Launch a kernel; False: it is held back until recent_kernel is not negative.

        Source: pre_launch_kernel and rate_limiter.
        """
        region, tail = self._region, self._offsets.tail
        region.put(tail + 16, "Q", int(now.timestamp()))
        limit = region.get(self._offsets.memory_limits + CORE_LIMITS + 8 * gpu, "Q")
        is_limiting = self._policy == "force" or (
            self._policy != "disable" and region.get(tail + 4, "i") != 0
        )
        if limit >= UNLIMITED or not is_limiting:
            return True
        if region.get(tail + 8, "i") < 0:
            return False
        region.put(tail + 8, "i", 2)
        return True

    def suspend(self) -> None:
        """Take SIGUSR2."""
        self._region.put(self._slot + self._offsets.status, "i", 2)

    def exit(self) -> None:
        """End in the normal way."""
        slot = self._found
        self._region.put(slot, "i", 0)
        self._region.put(slot + self._offsets.status, "i", 0)


def _limit(environment: Mapping[str, str], variable: str, index: int) -> int:
    own = limit_of(environment.get(f"{variable}_{index}", ""))
    return own or limit_of(environment.get(variable, ""))
