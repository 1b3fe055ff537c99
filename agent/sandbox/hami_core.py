"""A model of libvgpu.so, as far as the region of one container shows processes that use its GPUs.

It writes what agent/hami/region.py reads, as HAMi-core's own code does. How processes end, and how
launches are held back, is not modelled.
Source: HAMi-core src/multiprocess/multiprocess_memory_limit.c and
multiprocess_utilization_watcher.c at the commit that HAMi 2.9.0 pins. Older libraries have other
layouts, which agent/hami/region.py reads; files that they wrote are its vectors.
"""

import datetime as dt
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from agent.hami.region import MAGIC, MAX_GPUS, UUID_SIZE, V1_2

MEMORY_LIMIT: Final = "CUDA_DEVICE_MEMORY_LIMIT"
PRIORITY: Final = "CUDA_TASK_PRIORITY"
_UNITS: Final = {"K": 10, "M": 20, "G": 30}
_PURPOSES: Final = {"context": 0, "module": 8, "data": 16}
_TOTAL: Final = 32


def limit_of(text: str) -> int:
    """The limit that a variable's text means: digits, and a unit as the last character. 0: none."""
    digits = re.match(r"\d*", text).group()  # type: ignore[union-attr]  # it always matches
    return int(digits or "0") << _UNITS.get(text[-1:].upper(), 0)


class HamiCoreRegion:
    """The region at `path`, for the processes of one container."""

    offsets: Final = V1_2

    def __init__(self, path: Path) -> None:
        self.path = path

    def name_gpus(self, uuids: Sequence[str]) -> None:
        """Write the GPUs, as the first nvmlInit of a process does."""
        for index, uuid in enumerate(uuids):
            self.put(self.offsets.uuids + index * UUID_SIZE, f"{UUID_SIZE}s", uuid.encode())
        self.put(self.offsets.gpu_count, "Q", len(uuids))

    def start(
        self, pid: int, environment: Mapping[str, str], now: dt.datetime
    ) -> "HamiCoreProcess":
        """Begin a process, which takes the next slot. `pid`: in the container.

        The first one makes the region, with the limits of its environment.
        """
        offsets = self.offsets
        if not self.path.exists():
            self.path.touch()
            self.path.chmod(0o666)
            names = [(f"{MEMORY_LIMIT}_{index}", MEMORY_LIMIT) for index in range(MAX_GPUS)]
            texts = [environment.get(own, environment.get(each, "")) for own, each in names]
            self.put(offsets.size, "B", 0)
            self.put(4, "II", *(offsets.version or ()))
            self.put(offsets.memory_limits, f"{MAX_GPUS}Q", *map(limit_of, texts))
            self.put(offsets.tail, "iiii", 0, 1, 2, int(environment.get(PRIORITY, "1")))
            self.put(0, "i", MAGIC)
        number = self.get(offsets.tail, "i")
        self.put(offsets.tail, "i", number + 1)
        self.put(offsets.tail + 16, "Q", int(now.timestamp()))
        slot = offsets.slots + number * offsets.slot_size
        self.put(slot, "i", pid)
        self.put(slot + offsets.status, "i", 1)
        return HamiCoreProcess(self, slot)

    def get(self, offset: int, form: str) -> int:
        """Read one number."""
        number: int = struct.unpack_from(f"<{form}", self.path.read_bytes(), offset)[0]
        return number

    def put(self, offset: int, form: str, *values: int | bytes) -> None:
        """Write fields; the file grows to hold them."""
        with self.path.open("r+b") as region:
            region.seek(offset)
            region.write(struct.pack(f"<{form}", *values))


class HamiCoreProcess:
    """A process of the container that uses CUDA, with its slot of the region."""

    def __init__(self, region: HamiCoreRegion, slot: int) -> None:
        self._region = region
        self.slot = slot

    def allocate(self, gpu: int, size: int, purpose: str = "data") -> None:
        """Add bytes to the use of the GPU; a negative size frees them."""
        region, offsets = self._region, self._region.offsets
        used = self.slot + offsets.used + gpu * offsets.memory_size
        for field in (used + _PURPOSES[purpose], used + _TOTAL):
            region.put(field, "Q", region.get(field, "Q") + size)

    def watch(self, gpu: int, sm_percent: int) -> None:
        """Write what NVML reports of the process, as the watcher's thread does."""
        offsets = self._region.offsets
        utilisation = self.slot + offsets.utilisation + gpu * offsets.utilisation_size
        self._region.put(utilisation + 16, "Q", sm_percent)

    def launch(self, now: dt.datetime) -> None:
        """Launch a kernel that nothing holds back."""
        self._region.put(self._region.offsets.tail + 16, "Q", int(now.timestamp()))
