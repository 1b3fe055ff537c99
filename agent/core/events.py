"""What the driver and a probe can report of a GPU."""

import dataclasses
import enum

from agent.core.gpu import GpuUuid
from agent.core.gpu_signs import NO_SIGNS, GpuSigns


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
