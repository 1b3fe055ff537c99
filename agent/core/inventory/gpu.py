"""A GPU as the driver describes it: facts only, no judgement, no sharing."""

import dataclasses
import datetime as dt
import enum
from typing import Final, NewType

GpuUuid = NewType("GpuUuid", str)
"""`GPU-…` as NVML prints it: the identity of a GPU. The index is for display and ordering."""


NO_INDEX: Final = -1
"""The index of a GPU that the driver does not list and that nobody has described."""


class PciPath(enum.IntEnum):
    """How two GPUs reach each other over PCI; HAMi's points for the pair (§1.4 of its contract).

    Source: HAMi pkg/device/nvidia/calculate_score.go.
    """

    CROSS_CPU = 10
    SAME_CPU = 20
    HOST_BRIDGE = 30
    MULTI_SWITCH = 40
    SINGLE_SWITCH = 50
    SAME_BOARD = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """What connects a GPU to the GPU `peer`: its PCI path, if known, and its number of NVLinks.

    `peer_to_peer`: the driver lets them read each other's memory; None where it does not tell.
    """

    peer: GpuUuid
    path: PciPath | None = None
    nvlinks: int = 0
    peer_to_peer: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU.

    `index` is NO_INDEX for one of which only the identity is known. `memory_mib` is total bytes //
    2**20, None where the driver cannot tell (coherent memory). `numa` is None when unknown; `minor`
    is the N of /dev/nvidiaN.
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
        """What people call it, in short: its index, where that is known."""
        return str(self.uuid) if self.index == NO_INDEX else str(self.index)

    @property
    def title(self) -> str:
        """The same with its identity."""
        known = "of unknown index" if self.index == NO_INDEX else str(self.index)
        return f"GPU {known} ({self.uuid})"


class Trouble(enum.StrEnum):
    """Why the driver does not describe a GPU that it lists."""

    LOST = "lost"
    SILENT = "silent"
    """It has not answered in time: it may be waking."""
    RESET = "reset"
    """The driver answers for it only when it was reset."""
    DENIED = "denied"
    """The agent may not ask."""
    RELEASED = "released"
    """An operator has had it released for work on it."""
    UNPLACED = "unplaced"
    """It is taken back, and the driver has never described it: that takes a look at all GPUs."""
    UNSUPPORTED = "unsupported"
    """The driver does not know the question for this GPU."""
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class GpuFault:
    """A GPU that the driver lists but could not describe: left out of the inventory, and said.

    `gpu` is its UUID, or `index N` where only that is known; `index` beside a UUID: if it is told.
    """

    gpu: str
    text: str
    trouble: Trouble = Trouble.FAILED
    index: int = NO_INDEX

    @property
    def lost(self) -> bool:
        """True when it has fallen off the bus."""
        return self.trouble is Trouble.LOST

    @property
    def sentence(self) -> str:
        """Which GPU, and what is wrong with it."""
        return f"GPU {self.gpu}: {self.text}"


@dataclasses.dataclass(frozen=True, slots=True)
class Scan:
    """One look at all GPUs of the node, sorted by index. `library_version` None: not told."""

    driver_version: str
    gpus: tuple[Gpu, ...]
    faults: tuple[GpuFault, ...] = ()
    library_version: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class GpuSample:
    """How much a GPU is used at one moment."""

    uuid: GpuUuid
    gpu_percent: int | None = None
    """Share of the last sample period in which a kernel ran, 0 to 100."""
    memory_percent: int | None = None
    """Share of the last sample period in which its memory was read or written, 0 to 100."""
    used_mib: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """A sample, and when it was taken."""

    at: dt.datetime
    sample: GpuSample
