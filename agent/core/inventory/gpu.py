"""A GPU as the driver describes it, without its health and without how it is shared."""

import datetime as dt
import enum
from typing import Final, NewType

import msgspec

GpuUuid = NewType("GpuUuid", str)
"""`GPU-…` as NVML prints it: the identity of a GPU. The index is for display and ordering."""

NO_INDEX: Final = -1
"""The index of a GPU whose index is not known, because the driver never described it."""


class PciPath(enum.IntEnum):
    """The PCI path between two GPUs; the value is HAMi's points for the pair.

    Source: HAMi pkg/device/nvidia/calculate_score.go.
    """

    CROSS_CPU = 10
    SAME_CPU = 20
    HOST_BRIDGE = 30
    MULTI_SWITCH = 40
    SINGLE_SWITCH = 50
    SAME_BOARD = 60


class Link(msgspec.Struct, frozen=True):
    """The connection to the GPU `peer`: PCI path (None: not known) and number of NVLinks.

    `peer_to_peer`: whether the driver lets the two read each other's memory; None: not known.
    """

    peer: GpuUuid
    path: PciPath | None = None
    nvlinks: int = 0
    peer_to_peer: bool | None = None


class Gpu(msgspec.Struct, frozen=True):
    """One physical GPU.

    `index` is NO_INDEX if only the UUID is known. `memory_mib` is total bytes // 2**20, or None if
    the driver does not report it (coherent memory). `numa` is None if it is not known. `minor` is
    the N of /dev/nvidiaN.
    """

    uuid: GpuUuid
    index: int
    name: str
    memory_mib: int | None
    pci: str
    numa: int | None = None
    minor: int | None = None
    mig_enabled: bool = False
    links: tuple[Link, ...] = ()

    @property
    def label(self) -> str:
        """The index, or the UUID if the index is not known."""
        return str(self.uuid) if self.index == NO_INDEX else str(self.index)

    @property
    def title(self) -> str:
        """The index and the UUID, for people."""
        known = "of unknown index" if self.index == NO_INDEX else str(self.index)
        return f"GPU {known} ({self.uuid})"


class Trouble(enum.StrEnum):
    """Why the driver does not describe a GPU that it lists."""

    LOST = "lost"
    SILENT = "silent"
    """It has not answered in time. It may still be initialising."""
    RESET = "reset"
    """The driver refuses calls for it until it is reset."""
    DENIED = "denied"
    """The driver refuses the agent access to it."""
    RELEASED = "released"
    """An operator released it for work on it."""
    UNPLACED = "unplaced"
    """It was taken back, but the driver never described it. Only a scan of all GPUs finds it."""
    UNLISTED = "unlisted"
    """The kernel's driver has it, and the library does not list it. It is named by its address."""
    UNSUPPORTED = "unsupported"
    """The driver does not support the call for this GPU."""
    FAILED = "failed"


_RESET: Final = "if this lasts, reset it or reboot the node"
_REMEDIES: Final = {
    Trouble.LOST: _RESET,
    Trouble.FAILED: _RESET,
    Trouble.RESET: "reset it or reboot the node",
    Trouble.SILENT: "it may still be initialising, which takes seconds without the persistence "
    "daemon; it is shared as soon as it answers",
    Trouble.RELEASED: "take it back with hami-agent recheck",
    Trouble.UNPLACED: "take them back with hami-agent recheck all",
    Trouble.DENIED: "let the agent open its device file (/dev/nvidiaN), through the container "
    "runtime or as root",
    Trouble.UNLISTED: "let the agent open its device file (/dev/nvidiaN), through the container "
    "runtime or as root; restart the agent's pod if the GPU is new",
    Trouble.UNSUPPORTED: "use a driver that supports this GPU, or leave it out with "
    "sharing.filterUUIDs",
}


class GpuFault(msgspec.Struct, frozen=True):
    """A GPU that the driver lists but does not describe. The inventory leaves it out.

    `gpu` is the UUID, or `index N` if only the index is known. `index` is NO_INDEX if not known.
    """

    gpu: str
    text: str
    trouble: Trouble = Trouble.FAILED
    index: int = NO_INDEX

    @property
    def lost(self) -> bool:
        """True when the GPU has fallen off the bus."""
        return self.trouble is Trouble.LOST

    @property
    def remedy(self) -> str:
        """What a person can do, as the end of a sentence that says what is wrong."""
        return _REMEDIES[self.trouble]

    @property
    def sentence(self) -> str:
        """Which GPU, and what is wrong with it."""
        index = f"{self.index} ({self.gpu})"
        is_unplaced = self.index == NO_INDEX or self.gpu == f"index {self.index}"
        return f"GPU {self.gpu if is_unplaced else index}: {self.text}"


class Scan(msgspec.Struct, frozen=True):
    """All GPUs of the node, sorted by index. `library_version` is None if it is not known."""

    driver_version: str
    gpus: tuple[Gpu, ...]
    faults: tuple[GpuFault, ...] = ()
    library_version: str | None = None

    def keeping(self, kept: frozenset[GpuUuid], reason: str) -> "Scan":
        """Only with the GPUs `kept`. The others become faults with this reason."""
        gpus = tuple(gpu for gpu in self.gpus if gpu.uuid in kept)
        others = (gpu for gpu in self.gpus if gpu.uuid not in kept)
        left = [GpuFault(gpu.uuid, reason, index=gpu.index) for gpu in others]
        return msgspec.structs.replace(self, gpus=gpus, faults=(*self.faults, *left))


class GpuSample(msgspec.Struct, frozen=True):
    """How much a GPU is used at one moment."""

    uuid: GpuUuid
    gpu_percent: int | None = None
    """Share of the last sample period in which a kernel ran, 0 to 100."""
    memory_percent: int | None = None
    """Share of the last sample period in which its memory was read or written, 0 to 100."""
    used_mib: int | None = None
    """By processes. Drivers before 510 count what they reserve, too."""
    reserved_mib: int = 0
    """By the driver, as far as `used_mib` is without it."""
    celsius: int | None = None
    milliwatts: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    """Both in the life of the GPU, until somebody clears them."""


class Sampled(msgspec.Struct, frozen=True):
    """A sample with the time at which it was taken."""

    at: dt.datetime
    sample: GpuSample
