"""Probes and samples a GPU. All functions block and run on the GPU's thread."""

import ctypes
from collections.abc import Callable
from typing import Final, TypeVar

from agent.core.health.reports import FabricState, GpuSigns, Probe, ProbeOutcome, RecoveryAction
from agent.core.inventory.gpu import GpuSample, GpuUuid
from agent.core.inventory.slices import MIB
from agent.host.nvml.handles import Handles
from agent.host.nvml.library import (
    ECC_CORRECTED,
    ECC_IN_LIFE,
    ECC_SINCE_LOAD,
    ECC_UNCORRECTED,
    FABRIC_COMPLETED,
    FABRIC_IN_PROGRESS,
    FABRIC_NOT_STARTED,
    FIELD_RECOVERY_ACTION,
    GPU_IS_LOST,
    MEMORY_V2,
    RESET_REQUIRED,
    RETIRED_FOR_DOUBLE_BIT,
    RETIRED_FOR_SINGLE_BIT,
    TEMPERATURE_GPU,
    FabricInfo,
    Handle,
    NvmlLibrary,
    code,
    driver_wide,
    maybe,
    translate,
)

T = TypeVar("T")

_RECOVERY: Final = {
    0: RecoveryAction.NONE,
    1: RecoveryAction.GPU_RESET,
    2: RecoveryAction.NODE_REBOOT,
    3: RecoveryAction.DRAIN_P2P,
    4: RecoveryAction.DRAIN_AND_RESET,
    5: RecoveryAction.RECOVER_IMEX_DOMAIN,
    6: RecoveryAction.BUS_RESET,
    7: RecoveryAction.SYSTEM_REBOOT,
}
"""nvmlDeviceGpuRecoveryAction_t."""

_FABRIC: Final = {
    FABRIC_NOT_STARTED: FabricState.NOT_STARTED,
    FABRIC_IN_PROGRESS: FabricState.IN_PROGRESS,
}

_GRAVE: Final = frozenset({GPU_IS_LOST, RESET_REQUIRED})


def probe(library: NvmlLibrary, handles: Handles, uuid: GpuUuid) -> Probe:
    """Probe the GPU. Raises GpuError (released), DriverError (the whole driver fails)."""
    try:
        handle = handles.of_uuid(uuid)
        maybe(library, lambda: library.nvmlDeviceGetMemoryInfo(handle))
        signs = signs_of(library, handle)
    except library.NVMLError as error:
        driver_error = driver_wide(error)
        if driver_error is not None:
            raise driver_error from error
        lost = getattr(translate(error, uuid), "lost", False)
        unanswered = ProbeOutcome.REFUSED if code(error) == RESET_REQUIRED else ProbeOutcome.FAILED
        return Probe(uuid, ProbeOutcome.LOST if lost else unanswered, str(error))
    if signs.rows_failed:
        text = "a row of its memory could not be remapped"
        return Probe(uuid, ProbeOutcome.FAILED, text, signs)
    return Probe(uuid, ProbeOutcome.PASSED, signs=signs)


def signs_of(library: NvmlLibrary, handle: Handle) -> GpuSigns:
    """Read the signs of the GPU. Raises NVMLError when the GPU or the driver is gone."""
    rows = _sign(library, lambda: library.nvmlDeviceGetRemappedRows(handle))
    pending = _sign(library, lambda: library.nvmlDeviceGetRetiredPagesPendingStatus(handle))
    return GpuSigns(
        rows_pending=None if rows is None else bool(rows[2]),
        rows_failed=None if rows is None else bool(rows[3]),
        rows_remapped=None if rows is None else rows[0] + rows[1],
        pages_pending=None if pending is None else bool(pending),
        pages_retired=_sign(library, lambda: _retired(library, handle)),
        ecc_corrected=_errors(library, handle, ECC_CORRECTED, ECC_SINCE_LOAD),
        ecc_uncorrected=_errors(library, handle, ECC_UNCORRECTED, ECC_SINCE_LOAD),
        recovery=_sign(library, lambda: _recovery(library, handle)),
        fabric=_sign(library, lambda: _fabric(library, handle)),
    )


def sample(library: NvmlLibrary, handles: Handles, uuid: GpuUuid) -> GpuSample:
    """Read how much the GPU is used. Raises NVMLError, GpuError."""
    handle = handles.of_uuid(uuid)
    rates = _sign(library, lambda: library.nvmlDeviceGetUtilizationRates(handle))
    # The first form counts what the driver reserves as used; drivers before 510 have no other.
    memory = _sign(library, lambda: library.nvmlDeviceGetMemoryInfo(handle, MEMORY_V2))
    if memory is None:
        memory = _sign(library, lambda: library.nvmlDeviceGetMemoryInfo(handle))
    return GpuSample(
        uuid,
        gpu_percent=None if rates is None else int(rates.gpu),
        memory_percent=None if rates is None else int(rates.memory),
        used_mib=None if memory is None else int(memory.used) // MIB,
        reserved_mib=int(getattr(memory, "reserved", 0)) // MIB,
        celsius=_sign(library, lambda: library.nvmlDeviceGetTemperature(handle, TEMPERATURE_GPU)),
        milliwatts=_sign(library, lambda: library.nvmlDeviceGetPowerUsage(handle)),
        ecc_corrected=_errors(library, handle, ECC_CORRECTED, ECC_IN_LIFE),
        ecc_uncorrected=_errors(library, handle, ECC_UNCORRECTED, ECC_IN_LIFE),
    )


def _retired(library: NvmlLibrary, handle: Handle) -> int:
    causes = (RETIRED_FOR_SINGLE_BIT, RETIRED_FOR_DOUBLE_BIT)
    return sum(len(library.nvmlDeviceGetRetiredPages(handle, cause)) for cause in causes)


def _errors(library: NvmlLibrary, handle: Handle, kind: int, span: int) -> int | None:
    return _sign(library, lambda: int(library.nvmlDeviceGetTotalEccErrors(handle, kind, span)))


def _recovery(library: NvmlLibrary, handle: Handle) -> RecoveryAction | None:
    """Raises NVMLError, also for the field's own error: a driver before 570 has no such field."""
    value = library.nvmlDeviceGetFieldValues(handle, [FIELD_RECOVERY_ACTION])[0]
    if value.nvmlReturn:
        raise library.NVMLError(value.nvmlReturn)
    return _RECOVERY.get(int(value.value.uiVal), RecoveryAction.OTHER)


def _fabric(library: NvmlLibrary, handle: Handle) -> FabricState | None:
    info = FabricInfo()
    library.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    if info.state == FABRIC_COMPLETED:
        return FabricState.FAILED if info.status else FabricState.COMPLETED
    return _FABRIC.get(info.state)


def _sign(library: NvmlLibrary, ask: Callable[[], T]) -> T | None:
    """Return the answer, or None if the call fails: a sign alone proves no fault.

    Raises NVMLError when the GPU is lost or must be reset, or the driver is gone.
    """
    try:
        return ask()
    except library.NVMLError as error:
        if code(error) in _GRAVE or driver_wide(error) is not None:
            raise
        return None
