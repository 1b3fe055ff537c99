"""What the driver and probes report about a GPU, before any verdict."""

import enum

import msgspec

from agent.core.inventory.gpu import GpuUuid


class RecoveryAction(enum.StrEnum):
    """The action that the GPU needs (nvmlDeviceGpuRecoveryAction_t, from driver 570 on)."""

    NONE = "none"
    GPU_RESET = "gpu-reset"
    NODE_REBOOT = "node-reboot"
    DRAIN_P2P = "drain-p2p"
    DRAIN_AND_RESET = "drain-and-reset"
    RECOVER_IMEX_DOMAIN = "recover-imex-domain"
    BUS_RESET = "bus-reset"
    SYSTEM_REBOOT = "system-reboot"
    OTHER = "other"
    """An action of a newer driver that the agent does not know."""


class FabricState(enum.StrEnum):
    """Whether a GPU has joined the fabric of its NVSwitches (nvmlGpuFabricState_t)."""

    NOT_STARTED = "not-started"
    IN_PROGRESS = "in-progress"
    COMPLETED = "completed"
    FAILED = "failed"
    """The GPU tried to join and got an error."""


class GpuSigns(msgspec.Struct, frozen=True):
    """The state of one GPU's memory, its recovery action and its fabric.

    None means that this GPU or driver does not report the value. It never means that all is well.
    """

    rows_pending: bool | None = None
    """Memory rows wait for a reset to be remapped."""
    rows_failed: bool | None = None
    """A memory row could not be remapped, because no spare row is left."""
    rows_remapped: int | None = None
    """Rows remapped so far, after corrected and uncorrected errors."""
    pages_pending: bool | None = None
    """Memory pages wait for a reset to be retired (GPUs before Ampere)."""
    pages_retired: int | None = None
    """Memory pages retired so far (GPUs before Ampere)."""
    ecc_corrected: int | None = None
    """Corrected memory errors since the driver was loaded."""
    ecc_uncorrected: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    recovery: RecoveryAction | None = None
    fabric: FabricState | None = None
    """Also None for a GPU without NVSwitches."""


NO_SIGNS = GpuSigns()


class EventKind(enum.StrEnum):
    """Kinds of driver reports."""

    XID = "xid"
    ECC_SINGLE = "ecc-single"
    ECC_DOUBLE = "ecc-double"
    POWER_SOURCE = "power-source"
    """The GPU's power supply changed, for example from external power to the bus."""
    CHANGED = "changed"
    """GPUs came, went or changed their order: scan again."""


class DriverEvent(msgspec.Struct, frozen=True):
    """One report of the driver. `uuid` None: about all GPUs, or about one that is not known."""

    kind: EventKind
    uuid: GpuUuid | None = None
    xid: int | None = None


class ProbeOutcome(enum.StrEnum):
    """The outcome of a probe of a GPU."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    """The driver refuses calls until the GPU is reset (NVML_ERROR_RESET_REQUIRED)."""
    LOST = "lost"
    SILENT = "silent"
    """No answer within the deadline."""


class Probe(msgspec.Struct, frozen=True):
    """The result of probing the GPU `uuid`. `text` is the driver's error text.

    `unmonitored`: why the agent does not receive the events of this GPU. Empty if it does, or if
    the agent does not listen for events.
    """

    uuid: GpuUuid
    outcome: ProbeOutcome
    text: str = ""
    signs: GpuSigns = NO_SIGNS
    unmonitored: str = ""
