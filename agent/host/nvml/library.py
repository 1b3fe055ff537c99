"""The NVML calls we use, typed, and what their errors mean.

The module `pynvml` has this shape; tests hand in one of their own. Numbers are the ABI of nvml.h.
"""

import ctypes
import importlib
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

from agent.core.errors import AgentError, DriverError, DriverMissing, GpuError, cap
from agent.core.inventory.gpu import Trouble

T = TypeVar("T")

SONAME: Final = "libnvidia-ml.so.1"
PLACES: Final = tuple(
    f"{top}/{name}"
    for top in ("usr", ".")
    for name in ("lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
)
"""Directories of the driver's library on a host."""

UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
GPU_NOT_FOUND: Final = 28
UNKNOWN: Final = 999

EVENT_ECC_SINGLE: Final = 0x1
EVENT_ECC_DOUBLE: Final = 0x2
EVENT_XID: Final = 0x8
EVENT_POWER_SOURCE: Final = 0x80
EVENT_MIG_CHANGE: Final = 0x100

ECC_CORRECTED: Final = 0
ECC_UNCORRECTED: Final = 1
ECC_SINCE_LOAD: Final = 0
RETIRED_FOR_SINGLE_BIT: Final = 0
RETIRED_FOR_DOUBLE_BIT: Final = 1
FIELD_RECOVERY_ACTION: Final = 230
P2P_READ: Final = 0
P2P_OK: Final = 0

LINK_TO_SWITCH: Final = 2
MOST_LINKS: Final = 36

FABRIC_NOT_STARTED: Final = 1
FABRIC_IN_PROGRESS: Final = 2
FABRIC_COMPLETED: Final = 3

Handle = Any
"""What the library names a GPU by: a pointer that only the library may look into."""

_UNABLE: Final = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND})
_TROUBLES: Final = {
    GPU_IS_LOST: Trouble.LOST,
    GPU_NOT_FOUND: Trouble.LOST,
    NOT_FOUND: Trouble.LOST,
    RESET_REQUIRED: Trouble.RESET,
    NO_PERMISSION: Trouble.DENIED,
    NOT_SUPPORTED: Trouble.UNSUPPORTED,
    FUNCTION_NOT_FOUND: Trouble.UNSUPPORTED,
}
_MISSING: Final = {
    LIBRARY_NOT_FOUND: (
        f"{SONAME} is not found",
        (
            "install the NVIDIA driver on this node, let the container runtime mount it, or name "
            "the file with --nvml-library"
        ),
    ),
    DRIVER_NOT_LOADED: (
        "the NVIDIA kernel module is not loaded",
        "load it (modprobe nvidia) or install the driver for this kernel",
    ),
    LIB_RM_VERSION_MISMATCH: (
        "the driver's library and kernel module differ in version",
        "reboot, or reload the module and restart the agent",
    ),
    NO_PERMISSION: (
        "the driver may not be used: /dev/nvidiactl cannot be opened by this process",
        "run as a user who may open it, or let the container runtime give it",
    ),
}
"""What is missing, and what to do."""


class FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t; `status` is an error code, once the state is completed."""

    _fields_ = [  # type: ignore[mutable-override] # as ctypes wants it
        ("cluster", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    ]


class NvmlLibrary(Protocol):
    """The part of pynvml that we call. Every call may raise `NVMLError`, whose `value` says why.

    Functions that pynvml has in versions are called by their version: without one it raises an
    error of another kind where the driver is older.
    """

    NVMLError: type[Exception]
    nvmlLib: Any  # noqa: N815 -- pynvml's name

    def nvmlInit(self) -> None: ...  # noqa: D102, N802 -- pynvml's names, here and below
    def nvmlShutdown(self) -> None: ...  # noqa: D102, N802
    def nvmlSystemGetDriverVersion(self) -> str: ...  # noqa: D102, N802
    def nvmlSystemGetNVMLVersion(self) -> str: ...  # noqa: D102, N802
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle: ...  # noqa: D102, N802
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Handle: ...  # noqa: D102, N802
    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str) -> Handle: ...  # noqa: D102, N802, N803
    def nvmlDeviceGetUUID(self, handle: Handle) -> str: ...  # noqa: D102, N802
    def nvmlDeviceGetName(self, handle: Handle) -> str: ...  # noqa: D102, N802
    def nvmlDeviceGetMemoryInfo(self, handle: Handle) -> Any: ...  # noqa: ANN401, D102, N802
    def nvmlDeviceGetPciInfo(self, handle: Handle) -> Any: ...  # noqa: ANN401, D102, N802
    def nvmlDeviceGetMinorNumber(self, handle: Handle) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetMigMode(self, device: Handle) -> list[int]: ...  # noqa: D102, N802
    def nvmlDeviceGetRetiredPagesPendingStatus(self, device: Handle) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetRetiredPages(self, device: Handle, sourceFilter: int) -> list[int]: ...  # noqa: D102, N802, N803
    def nvmlDeviceGetTotalEccErrors(  # noqa: D102, N802
        self,
        handle: Handle,
        errorType: int,  # noqa: N803
        counterType: int,  # noqa: N803
    ) -> int: ...
    def nvmlDeviceGetFieldValues(self, handle: Handle, fieldIds: list[int]) -> Any: ...  # noqa: ANN401, D102, N802, N803
    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any: ...  # noqa: ANN401, D102, N802
    def nvmlDeviceGetP2PStatus(self, device1: Handle, device2: Handle, p2pIndex: int) -> int: ...  # noqa: D102, N802, N803
    def nvmlDeviceGetRemappedRows(self, device: Handle) -> tuple[int, int, int, int]: ...  # noqa: D102, N802
    def nvmlDeviceGetGpuFabricInfo(self, device: Handle, gpuFabricInfo: Any) -> int: ...  # noqa: ANN401, D102, N802, N803
    def nvmlDeviceGetTopologyCommonAncestor(self, device1: Handle, device2: Handle) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetNvLinkState(self, device: Handle, link: int) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: Handle, link: int) -> Any: ...  # noqa: ANN401, D102, N802
    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Handle, link: int) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetSupportedEventTypes(self, handle: Handle) -> int: ...  # noqa: D102, N802
    def nvmlDeviceRegisterEvents(  # noqa: D102, N802
        self,
        handle: Handle,
        eventTypes: int,  # noqa: N803
        eventSet: Any,  # noqa: ANN401, N803
    ) -> None: ...
    def nvmlEventSetCreate(self) -> Any: ...  # noqa: ANN401, D102, N802
    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> Any: ...  # noqa: ANN401, D102, N802, N803
    def nvmlEventSetFree(self, eventSet: Any) -> None: ...  # noqa: ANN401, D102, N802, N803


def pynvml() -> NvmlLibrary:
    """The module `pynvml`, imported only where a real driver is used: it costs memory and time."""
    return cast("NvmlLibrary", importlib.import_module("pynvml"))


def library_below(root: Path | None) -> Path | None:
    """The library's file in a directory that is laid out like a host's `/`; None: nowhere there.

    Source: NVIDIA k8s-device-plugin internal/lm and go-nvlib, the places that they look at.
    """
    places = (root / place / SONAME for place in PLACES) if root is not None else ()
    return next((path for path in places if path.is_file()), None)


def bind(library: NvmlLibrary, path: Path | None, *, anew: bool = True) -> None:
    """Make `library` use the file at `path` instead of the soname. Raises DriverMissing.

    DriverError where that would replace a loaded one although it may not (`anew`).

    pynvml loads the soname itself, but only while its `nvmlLib` is None: a library put there first
    is used. Function pointers that it kept of another library are dropped. Links are resolved, so
    that a new version behind the same link is another library. May block: dlopen.
    """
    if path is None:
        return
    file = path.resolve()
    if getattr(library.nvmlLib, "_name", None) == str(file):
        return
    if library.nvmlLib is not None and not anew:
        raise DriverError(
            f"{path} is another library than the one that is loaded, from which a call has not "
            "come back; when it does, the new one is used"
        )
    try:
        loaded = ctypes.CDLL(str(file))
    except OSError as error:
        raise DriverMissing(
            f"{path} cannot be loaded as the driver's library ({cap(str(error))})",
            remedy="mend --nvml-library or leave it out",
        ) from error
    pointers: MutableMapping[str, object] = getattr(library, "_nvmlGetFunctionPointer_cache", {})
    pointers.clear()
    library.nvmlLib = loaded


def replaced(maps: Path = Path("/proc/self/maps")) -> Path | None:
    """The library that has taken the place of the one we have loaded by its soname, if any.

    A driver's upgrade leaves the link and changes what is behind it; the loader, asked for the
    soname again, keeps to the file that it has.
    """
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    stem = SONAME.removesuffix(".1")
    loaded = {
        Path(line[line.index("/") :].removesuffix(" (deleted)")) for line in lines if "/" in line
    }
    ours = {file for file in loaded if file.name.startswith(stem)}
    behind = {file.with_name(SONAME).resolve() for file in ours}
    return next((file for file in sorted(behind - ours) if file.is_file()), None)


def code(error: Exception) -> int:
    """The number of an NVMLError."""
    return int(getattr(error, "value", UNKNOWN))


def is_unable(error: Exception) -> bool:
    """True when this GPU or this driver does not know the question."""
    return code(error) in _UNABLE


def maybe(library: NvmlLibrary, ask: Callable[[], T]) -> T | None:
    """The answer, or None where this GPU or this driver cannot tell. Raises other NVMLErrors."""
    try:
        return ask()
    except library.NVMLError as error:
        if is_unable(error):
            return None
        raise


def driver_wide(error: Exception, *, about_gpu: bool = True) -> DriverError | None:
    """The error of the driver as a whole that `error` is, or None: it concerns one GPU.

    A refusal is the driver's where the driver was asked, and one GPU's where that was: its device
    file may be closed to us, or its processes another user's.
    """
    missing = _MISSING.get(code(error))
    if missing is not None and not (about_gpu and code(error) == NO_PERMISSION):
        said, remedy = missing
        return DriverMissing(said, remedy=remedy)
    if code(error) == UNINITIALIZED:
        return DriverError("the driver has ended our session; it is begun anew")
    return None


def translate(error: Exception, gpu: str) -> AgentError:
    """`error` in our own tree: DriverError of the whole, or GpuError that names `gpu`."""
    whole = driver_wide(error)
    if whole is not None:
        return whole
    is_lost = trouble(error) is Trouble.LOST
    return GpuError(gpu, cap(str(error)) or f"error {code(error)}", lost=is_lost)


def trouble(error: Exception) -> Trouble:
    """What an error says of the one GPU that was asked."""
    return _TROUBLES.get(code(error), Trouble.FAILED)


def text_of(value: str | bytes) -> str:
    """A string of the library: fields of structures are bytes, results are text."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value
