"""Slices: the ids into which a GPU is split, and the memory and compute to register for it."""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import NewType

import msgspec

from agent.core.errors import SettingsError
from agent.core.inventory.gpu import Gpu, GpuUuid

SliceId = NewType("SliceId", str)
"""`<GPU UUID>-<n>`, n from 0, as in HAMi: a node that switches to the agent keeps its ids."""

Held = Mapping[GpuUuid, tuple[SliceId, ...]]
"""Slices in use, by GPU."""

MIB = 1024 * 1024
MIG_MODE = "mig"
"""HAMi's operating mode whose GPUs the agent does not share yet."""

LIST_BYTES = 7 * MIB // 2
"""Most bytes of a list. The kubelet ends the stream at 4 MiB; the rest is for ids still held."""

INT32_MAX = 2**31 - 1
"""The largest number of MiB or percent in the register annotation."""

MAX_NUMBER = 9_999_999_999
"""The largest number of a slice."""

_SLICE_ID = re.compile(r"(.+)-(0|[1-9][0-9]{0,9})", re.DOTALL)


class SharingSettings(msgspec.Struct, frozen=True):
    """How GPUs are shared.

    `resource`: the name under which pods request slices and the kubelet advertises them.
    `split_count`: slices per GPU. `memory_scaling`, `core_scaling`: factors on what is registered.
    `preconfigured_mib`: MiB for a GPU whose memory the driver does not report (0: leave it out).
    `numa_topology`: tell the kubelet the NUMA node of each GPU.
    """

    split_count: int = 10
    memory_scaling: float = 1.0
    core_scaling: float = 1.0
    preconfigured_mib: int = 0
    mode: str = "hami-core"
    numa_topology: bool = False
    filter_uuids: frozenset[str] = frozenset()
    filter_indexes: frozenset[int] = frozenset()
    resource: str = "nvidia.com/gpu"

    def filters(self, gpu: Gpu) -> bool:
        """True if the settings leave the GPU out."""
        return gpu.uuid in self.filter_uuids or gpu.index in self.filter_indexes


class SliceGroup(msgspec.Struct, frozen=True):
    """The listed slices of one GPU, in the order of their numbers. All have the same health."""

    uuid: GpuUuid
    ids: tuple[SliceId, ...]
    healthy: bool
    numa: int | None


class SliceList(msgspec.Struct, frozen=True):
    """The content of one ListAndWatch message, in inventory order. `generation` identifies it."""

    generation: int = 0
    groups: tuple[SliceGroup, ...] = ()


def slice_id(uuid: GpuUuid, number: int) -> SliceId:
    """The id of slice `number` of the GPU."""
    return SliceId(f"{uuid}-{number}")


def split_slice_id(text: str) -> tuple[GpuUuid, int] | None:
    """GPU and number of a slice id, or None when `text` is not one."""
    match = _SLICE_ID.fullmatch(text)
    return (GpuUuid(match[1]), int(match[2])) if match else None


def listed_ids(uuid: GpuUuid, split_count: int, held: Iterable[SliceId]) -> tuple[SliceId, ...]:
    """The ids to list for a GPU: all held ones, then the lowest free ones up to the split count.

    A lower split count never removes a held id.
    """
    pairs = map(split_slice_id, held)
    numbers = {pair[1] for pair in pairs if pair is not None and pair[0] == uuid}
    unused = (number for number in range(split_count) if number not in numbers)
    numbers.update(itertools.islice(unused, max(0, split_count - len(numbers))))
    return tuple(slice_id(uuid, n) for n in sorted(numbers))


def slice_bytes(split_count: int) -> int:
    """The most bytes that a slice takes in a list: it is unhealthy and has a NUMA node.

    40 bytes for the UUID, the hyphen and the number, 9 for `Unhealthy`, 2 for the NUMA node, and a
    tag and a length for each of the five messages and strings around them.
    """
    return 40 + 1 + len(str(split_count - 1)) + 9 + 2 + 5 * 2


def check_list_size(gpus: int, split_count: int, origin: str) -> None:
    """Check that the kubelet accepts the list of this many slices.

    Raises:
        SettingsError: the list is too long. `origin`: where the split count is from.
    """
    each = slice_bytes(split_count)
    total = gpus * split_count * each
    if total > LIST_BYTES:
        most = LIST_BYTES // (gpus * each)
        raise SettingsError(
            f"{origin}: sharing.splitCount: {gpus} GPUs x {split_count} slices x {each} bytes are "
            f"a list of {total / MIB:.1f} MiB, and {LIST_BYTES / MIB:g} MiB is the most; "
            f"set it to {most} or less"
        )


def registered_mib(memory_mib: int | None, settings: SharingSettings) -> int | None:
    """MiB to register for a GPU, or None if the GPU must be left out.

    Truncated towards zero, as by HAMi's conversion to int32. Larger numbers become INT32_MAX;
    HAMi's overflow into numbers that no scheduler can use.
    Source: HAMi pkg/device-plugin/nvidiadevice/nvinternal/plugin/register.go getAPIDevices.
    """
    known = memory_mib if memory_mib is not None else settings.preconfigured_mib
    if known <= 0:
        return None
    scaling = 1.0 if settings.mode == MIG_MODE else settings.memory_scaling
    return min(known, INT32_MAX) if scaling == 1 else int(min(known * scaling, INT32_MAX))


def registered_core_percent(settings: SharingSettings) -> int:
    """Percent of compute to register: the scaling times 100, truncated; 100 in mode mig."""
    return 100 if settings.mode == MIG_MODE else int(min(settings.core_scaling * 100, INT32_MAX))


def type_name(name: str) -> str:
    """The GPU's name with the prefix that HAMi's scheduler (2.8 and later) matches."""
    return name if name.startswith("NVIDIA") else f"NVIDIA-{name}"
