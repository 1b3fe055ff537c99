"""What the driver and a probe can report of a GPU: facts, not yet judged.

In signs None means that this GPU or this driver does not tell, never that all is well.
"""

import dataclasses
import enum

from agent.core.inventory.gpu import GpuUuid


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


class EventKind(enum.StrEnum):
    """Kinds of driver reports."""

    XID = "xid"
    ECC_SINGLE = "ecc-single"
    ECC_DOUBLE = "ecc-double"
    POWER_SOURCE = "power-source"
    """The GPU's power supply changed, as from external power to the bus."""
    CHANGED = "changed"
    """GPUs came, went or were re-arranged: scan again."""


@dataclasses.dataclass(frozen=True, slots=True)
class DriverEvent:
    """One report of the driver. `uuid` None: it concerns all GPUs, or the driver cannot tell."""

    kind: EventKind
    uuid: GpuUuid | None = None
    xid: int | None = None


class ProbeOutcome(enum.StrEnum):
    """What an active question to a GPU found."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    """A question was refused until the GPU is reset (NVML_ERROR_RESET_REQUIRED, of any driver)."""
    LOST = "lost"
    SILENT = "silent"
    """No answer within the deadline."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """The result of one active question to the GPU `uuid`; `text` is the driver's words.

    `unmonitored` says why the driver's reports of this GPU do not reach us; empty: they do, or
    nobody listens to any.
    """

    uuid: GpuUuid
    outcome: ProbeOutcome
    text: str = ""
    signs: GpuSigns = NO_SIGNS
    unmonitored: str = ""
