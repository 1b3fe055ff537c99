"""What a GPU says of itself beside being there: signs of wear, and use.

Facts only: what they mean for serving it is judged in agent.core.health. Everywhere None means
that this GPU or this driver does not tell, never that all is well.
"""

import dataclasses
import datetime as dt
import enum

from agent.core.gpu import GpuUuid


class RecoveryAction(enum.StrEnum):
    """What the driver says that this GPU needs (nvmlDeviceGpuRecoveryAction_t; driver 570 on)."""

    NONE = "none"
    GPU_RESET = "gpu-reset"
    NODE_REBOOT = "node-reboot"
    DRAIN_P2P = "drain-p2p"
    DRAIN_AND_RESET = "drain-and-reset"
    RECOVER_IMEX_DOMAIN = "recover-imex-domain"
    BUS_RESET = "bus-reset"
    SYSTEM_REBOOT = "system-reboot"
    OTHER = "other"
    """A newer driver's action, which we do not know: something, and not nothing."""


class FabricState(enum.StrEnum):
    """Whether a GPU has joined the fabric of its NVSwitches (nvmlGpuFabricState_t)."""

    NOT_STARTED = "not-started"
    IN_PROGRESS = "in-progress"
    COMPLETED = "completed"
    FAILED = "failed"
    """It has tried, and the status is an error."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuSigns:
    """The state of one GPU's memory, and what the driver advises."""

    rows_pending: bool | None = None
    """Memory rows wait for a reset to be remapped."""
    rows_failed: bool | None = None
    """A memory row could not be remapped: no spare one is left."""
    rows_remapped: int | None = None
    """Rows that were remapped so far, after corrected and uncorrected errors."""
    pages_pending: bool | None = None
    """Memory pages wait for a reset to be retired (GPUs before Ampere)."""
    pages_retired: int | None = None
    """Memory pages that were retired so far (GPUs before Ampere)."""
    ecc_corrected: int | None = None
    """Corrected memory errors since the driver was loaded."""
    ecc_uncorrected: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    recovery: RecoveryAction | None = None
    fabric: FabricState | None = None
    """None as well for a GPU without NVSwitches."""


NO_SIGNS = GpuSigns()


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
