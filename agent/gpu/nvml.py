"""The NVML calls in use, typed, the meaning of their errors, and the library's file.

The module `pynvml` implements them; tests use their own. Importing it costs memory and time, so
only what opens a real driver imports this file.
"""

import ctypes
import os
import struct
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import pynvml

from agent.errors import DriverError, DriverMissing, GpuError, cap
from agent.model import Trouble

P = ParamSpec("P")
T = TypeVar("T")

SONAME: Final = "libnvidia-ml.so.1"
MAPS: Final = Path("/proc/self/maps")
_TRIPLES: Final = ("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
PLACES: Final = (
    *(f"{top}/{name}" for top in ("usr", ".") for name in ("lib64", *_TRIPLES)),
    *(f"usr/{name}/nvidia/current" for name in _TRIPLES),
    "usr/lib/wsl/lib",  # before usr/lib, where WSL may have a file of the distribution
    "usr/lib",
    "usr/lib/nvidia/tesla",
    "usr/local/lib",
    "usr/local/glibc/usr/lib",
    "run/opengl-driver/lib",
    "home/kubernetes/bin/nvidia/lib64",
    "opt/nvidia/lib64",
)
"""Directories of the driver's library on a host.

Debian and RHEL, Debian's alternatives, WSL, Arch, Bottlerocket, Talos (two), NixOS, Google's COS.
"""

FIELD_RECOVERY_ACTION: Final = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION. Older releases of pynvml do not name it."""

DRIVER: Final = "the driver"
"""The name in place of a GPU's for calls about the whole driver."""

NO_ANSWER: Final = "no answer in time"

Handle = Any
"""The library's opaque pointer to a GPU."""

_TROUBLES: Final = {
    pynvml.NVML_ERROR_GPU_IS_LOST: Trouble.LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: Trouble.LOST,
    pynvml.NVML_ERROR_NOT_FOUND: Trouble.LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: Trouble.RESET,
    pynvml.NVML_ERROR_NO_PERMISSION: Trouble.DENIED,
    pynvml.NVML_ERROR_NOT_SUPPORTED: Trouble.UNSUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: Trouble.UNSUPPORTED,
}
_MISSING: Final = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        f"{SONAME} is not found",
        (
            "install the NVIDIA driver on this node, let the container runtime mount it, or name "
            "the file with --nvml-library"
        ),
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "the NVIDIA kernel module is not loaded",
        "load it (modprobe nvidia) or install the driver for this kernel",
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the driver's library and kernel module differ in version",
        "reboot, or reload the module and restart the agent",
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "the driver may not be used: /dev/nvidiactl cannot be opened by this process",
        "run as a user who may open it, or let the container runtime give it",
    ),
}
"""What is missing, and the remedy."""


class CallFailed(GpuError):  # noqa: N818 -- names what happened
    """A call about one GPU failed, or has not returned in time (SILENT)."""

    def __init__(self, gpu: str, text: str, trouble: Trouble) -> None:
        super().__init__(gpu, text, lost=trouble is Trouble.LOST)
        self.trouble = trouble


NvmlLibrary = Any
"""The module pynvml, which has no types, or one with its functions.

Each call may raise its `NVMLError`, whose `value` is the code. Functions that have versions are
called by their version: with an older driver, the unversioned ones of pynvml raise another kind of
error.
"""


def library_below(root: Path | None) -> Path | None:
    """Find the library's file below a directory laid out like a host's `/`, or return None.

    Source: NVIDIA k8s-device-plugin internal/lm and go-nvlib, which search these places.
    """
    places = (root / place / SONAME for place in PLACES) if root is not None else ()
    return next((path for path in places if path.is_file()), None)


ELF_HEADER: Final = 64
"""The length of the header in bytes."""


def bind(library: NvmlLibrary, path: Path | None, *, anew: bool = True) -> None:
    """Make `library` use the file at `path` instead of the soname. May block (dlopen).

    pynvml loads the soname only while its `nvmlLib` is None, so this sets it first and drops the
    kept function pointers of another library. It resolves links: a new version behind the same link
    is another library.

    Raises DriverMissing, and DriverError if another library is loaded that may not be replaced
    (`anew` is False).
    """
    # The loader keeps the file that it has for the soname: to load it again changes nothing.
    if path is None and library.nvmlLib is not None:
        return

    file = Path(os.path.realpath(path)) if path is not None else library_below(Path("/"))
    if file is None or getattr(library.nvmlLib, "_name", None) == str(file):
        return

    if library.nvmlLib is not None and not anew:
        raise DriverError(
            f"{path} is not the loaded library, from which a call has not returned; the new one "
            "is used after that call returns"
        )

    try:
        if _is_cut_off(file):  # the loader would end the process with SIGBUS
            raise _refused_by_loader(str(path or file), "its end is missing")
        if path is None:
            return  # pynvml loads it, by the soname

        loaded = ctypes.CDLL(str(file))
    except OSError as error:
        raise _refused_by_loader(str(path or file), str(error)) from error

    pointers: MutableMapping[str, object] = getattr(library, "_nvmlGetFunctionPointer_cache", {})
    pointers.clear()
    library.nvmlLib = loaded


def _is_cut_off(file: Path) -> bool:
    """Whether an ELF file ends before its table of sections, which is the last part of it.

    Raises OSError. Source: elf(5), Elf64_Ehdr; the machines with such drivers are little-endian.
    """
    if not file.is_file():
        return False

    with file.open("rb") as opened:
        header = opened.read(ELF_HEADER)

    if len(header) < ELF_HEADER or header[:6] != b"\x7fELF\x02\x01":
        return False  # the loader says what it is

    (start,) = struct.unpack_from("<Q", header, 40)
    size, count = struct.unpack_from("<2H", header, 58)
    return int(start + size * count) > file.stat().st_size


def missing(library: NvmlLibrary, error: Exception, sys_root: Path) -> DriverMissing | None:
    """What is missing for nvmlInit where the code of `error` does not tell; None: it does.

    Without its device files it says that the kernel's module is not loaded. NVIDIA's runtime covers
    /proc/driver/nvidia in containers, but not /sys.
    """
    if code(error) == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        # Why the loader does not take the library that is there; None: there is none. It passes
        # over a file of another architecture as if it were not there.
        for place in (SONAME, library_below(Path("/"))):
            try:
                ctypes.CDLL(str(place or SONAME))
            except OSError as refusal:
                text = str(refusal)
                if place is not None and (place != SONAME or "No such file" not in text):
                    return _refused_by_loader(str(place), text)
        return None

    # Another library has the name, such as a stub of a container's image.
    if code(error) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
        file = getattr(library.nvmlLib, "_name", None) or SONAME
        return _refused_by_loader(str(file), "it has no function nvmlInit_v2")

    is_loaded = (sys_root / "module/nvidia").exists()
    if code(error) != pynvml.NVML_ERROR_DRIVER_NOT_LOADED or not is_loaded:
        return None

    return DriverMissing(
        "the NVIDIA kernel module is loaded, and this process has no device file of it "
        "(/dev/nvidiactl)",
        remedy="let the container runtime give the agent the GPUs (runtimeClassName, "
        "NVIDIA_VISIBLE_DEVICES), or make the files with nvidia-modprobe -u -c 0 on the host",
    )


def _refused_by_loader(file: str, text: str) -> DriverMissing:
    # The loader passes over such a file as if it were not there.
    names = file, os.path.realpath(file)
    if text.startswith(names) and "No such file" in text and Path(file).is_file():
        text = "it is built for another architecture"

    # The soname is no path: what the loader searched for by it is somewhere. A path may be wrong.
    return DriverMissing(
        f"{file} cannot be loaded as the driver's library ({cap(text)})",
        remedy="install the driver of this node's architecture again, or name another file with "
        "--nvml-library"
        if os.access(file, os.F_OK) or file == SONAME
        else "correct --nvml-library or omit it",
    )


def successor(library: NvmlLibrary, path: Path | None, maps: Path = MAPS) -> Path | None:
    """The file that a new process would load in place of the loaded library; None: the same.

    An upgrade of the driver changes the target of the soname's link, but the loader keeps the file
    that it has for the soname.
    """
    ours = _loaded(library, maps)
    by_link = {file.with_name(SONAME).resolve() for file in ours}
    theirs = {Path(os.path.realpath(path))} if path is not None and ours else by_link
    return next((file for file in sorted(theirs - ours) if file.is_file()), None)


def removed(library: NvmlLibrary, maps: Path = MAPS) -> Path | None:
    """The loaded library if neither it nor the soname's link beside it is there, else None."""
    ours = _loaded(library, maps)
    is_there = any(file.is_file() or file.with_name(SONAME).is_file() for file in ours)
    return None if is_there else min(ours, default=None)


def _loaded(library: NvmlLibrary, maps: Path) -> set[Path]:
    """The library's files in this process: by its path, or as the loader mapped the soname."""
    name = str(getattr(library.nvmlLib, "_name", None) or "")
    if "/" in name:
        return {Path(name)}

    # ctypes keeps the soname as it was given; only the kernel knows the file behind it.

    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()

    stem = SONAME.removesuffix(".1")
    files = {
        Path(line[line.index("/") :].removesuffix(" (deleted)")) for line in lines if "/" in line
    }

    return {file for file in files if file.name.startswith(stem)}


def code(error: Exception) -> int:
    """The code of an NVMLError."""
    return int(getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN))


def is_unable(error: Exception) -> bool:
    """True when this GPU or driver does not support the call."""
    return _TROUBLES.get(code(error)) is Trouble.UNSUPPORTED


def maybe(library: NvmlLibrary, ask: Callable[P, T], *args: P.args, **more: P.kwargs) -> T | None:
    """Return the answer, or None if this GPU or driver does not support the call.

    Raises other NVMLErrors.
    """
    try:
        return ask(*args, **more)
    except library.NVMLError as error:
        if is_unable(error):
            return None
        raise


def driver_wide(error: Exception, *, about_gpu: bool = True) -> DriverError | None:
    """The DriverError for `error` if it concerns the whole driver, or None: it concerns one GPU.

    NO_PERMISSION concerns the driver only if the call was not `about_gpu`: a GPU's device file may
    be closed to the agent, or its processes belong to another user.
    """
    missing = _MISSING.get(code(error))
    if missing is not None and not (about_gpu and code(error) == pynvml.NVML_ERROR_NO_PERMISSION):
        reason, remedy = missing
        return DriverMissing(reason, remedy=remedy)

    if code(error) == pynvml.NVML_ERROR_UNINITIALIZED:
        return DriverError("the driver ended the session; a new one begins")

    return None


def failure(error: Exception, gpu: str) -> DriverError | CallFailed:
    """What the error of a call means for `gpu`, which may be DRIVER."""
    if isinstance(error, TimeoutError):
        what, otherwise, found = "the driver does not answer", NO_ANSWER, Trouble.SILENT
    elif isinstance(error, ValueError):  # the binding could not decode a text
        what, otherwise, found = "the driver's answer cannot be decoded", "", Trouble.FAILED
    else:
        what, otherwise = "the driver answers with an error", f"error {code(error)}"
        found = _TROUBLES.get(code(error), Trouble.FAILED)

    text = cap(str(error)) or otherwise
    return DriverError(f"{what}: {text}") if gpu == DRIVER else CallFailed(gpu, text, found)


def text_of(value: str | bytes) -> str:
    """Decode a string of the library: fields of structures are bytes, results are str."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value
