"""NVML in this process: the library, its errors, the threads that call it, the GPUs.

The module `pynvml` implements the calls; tests use their own. Importing it costs memory and time,
so only what opens a real driver imports this file.
"""

import asyncio
import collections
import contextlib
import ctypes
import os
import queue
import re
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pynvml

from agent.errors import DriverError, DriverMissing, GpuError, cap
from agent.kit.timing import NOISE, Lag
from agent.model import (
    MIB,
    NAMELESS,
    NO_INDEX,
    FabricState,
    Gpu,
    GpuFault,
    GpuSample,
    GpuSigns,
    GpuUuid,
    Link,
    PciPath,
    Probe,
    ProbeOutcome,
    RecoveryAction,
    Trouble,
)

T = TypeVar("T")

# The library's file, and what its errors mean.

SONAME: Final = "libnvidia-ml.so.1"
MAPS: Final = Path("/proc/self/maps")
_MAPPED: Final = re.compile(r"(/(?:.*/)?libnvidia-ml\.so[^/\n]*?)(?: \(deleted\))?$", re.MULTILINE)
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
"""The library's directories on Debian and RHEL, Debian's alternatives, WSL, Arch, Bottlerocket,
Talos (two), NixOS and COS. Source: NVIDIA k8s-device-plugin internal/lm, go-nvlib."""

# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, which older releases of pynvml do not name.
FIELD_RECOVERY_ACTION: Final = 230
DRIVER: Final = "the driver"  # the name in place of a GPU's for calls about the whole driver
NO_ANSWER: Final = "no answer in time"
Handle = Any  # the library's opaque pointer to a GPU

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
        "install the NVIDIA driver, let the runtime mount it, or name it with --nvml-library",
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

_GRAVE: Final = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})


class CallFailed(GpuError):  # noqa: N818 -- names what happened
    """A call about one GPU failed, or has not returned in time (SILENT)."""

    def __init__(self, gpu: str, text: str, trouble: Trouble) -> None:
        super().__init__(gpu, text, lost=trouble is Trouble.LOST)
        self.trouble = trouble


NvmlLibrary = Any
"""The module pynvml, which has no types, or one with its functions. Each may raise its `NVMLError`.

Functions that have versions are called by their version: with an older driver, the unversioned ones
of pynvml raise another kind of error.
"""


def library_below(root: Path | None) -> Path | None:
    """Find the library's file below a directory laid out like a host's `/`, or return None."""
    places = (root / place / SONAME for place in PLACES) if root is not None else ()
    return next((path for path in places if path.is_file()), None)


def bind(library: NvmlLibrary, path: Path | None) -> None:
    """Make `library` use the file at `path` instead of the soname. Blocks. Raises DriverMissing.

    pynvml loads the soname only while its `nvmlLib` is None. A library that is loaded stays.
    """
    file = path or library_below(Path("/"))
    if file is None or library.nvmlLib is not None:
        return
    try:
        if file.is_file() and _is_cut_off(file):  # the loader would end the process with SIGBUS
            raise _refused_by_loader(str(file), "its end is missing")
        if path is not None:
            library.nvmlLib = ctypes.CDLL(os.path.realpath(path))
    except OSError as error:
        raise _refused_by_loader(str(file), str(error)) from error


def _is_cut_off(file: Path) -> bool:
    """Whether an ELF file ends before its last part, the table of sections. Raises OSError."""
    # Source: elf(5), Elf64_Ehdr; the machines with such drivers are little-endian.
    with file.open("rb") as opened:
        header = opened.read(64)
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        return False  # the loader says what it is
    start, size, count = struct.unpack_from("<Q10x2H", header, 40)
    return int(start + size * count) > file.stat().st_size


def missing(library: NvmlLibrary, error: Exception, sys_root: Path) -> DriverMissing | None:
    """What is missing for nvmlInit where the code of `error` does not tell; None: it does."""
    if code(error) == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        # Why the loader does not take the library that is there; None: there is none. It passes
        # over a file of another architecture as if it were not there.
        for place in filter(None, (SONAME, library_below(Path("/")))):
            try:
                ctypes.CDLL(str(place))
            except OSError as refusal:
                if place != SONAME or "No such file" not in str(refusal):
                    return _refused_by_loader(str(place), str(refusal))
        return None

    # Another library has the name, such as a stub of a container's image.
    if code(error) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
        file = getattr(library.nvmlLib, "_name", None) or SONAME
        return _refused_by_loader(str(file), "it has no function nvmlInit_v2")

    is_loaded = (sys_root / "module/nvidia").exists()
    if code(error) != pynvml.NVML_ERROR_DRIVER_NOT_LOADED or not is_loaded:
        return None

    text = (
        "the NVIDIA kernel module is loaded, and this process has no device file (/dev/nvidiactl)"
    )
    remedy = "let the container runtime give the agent the GPUs (runtimeClassName), or run "
    return DriverMissing(text, remedy=remedy + "nvidia-modprobe -u -c 0 on the host")


def _refused_by_loader(file: str, text: str) -> DriverMissing:
    # The loader passes over such a file as if it were not there.
    names = file, os.path.realpath(file)
    if text.startswith(names) and "No such file" in text and Path(file).is_file():
        text = "it is built for another architecture"
    return DriverMissing(
        f"{file} cannot be loaded as the driver's library ({cap(text)})",
        remedy="install the driver of this node's architecture again, or correct --nvml-library",
    )


def successor(library: NvmlLibrary, path: Path | None, maps: Path = MAPS) -> Path | None:
    """The file that a new process would load in place of the loaded library; None: the same."""
    ours = _loaded(library, maps)
    by_link = {file.with_name(SONAME).resolve() for file in ours}
    theirs = {Path(os.path.realpath(path))} if path is not None and ours else by_link
    return next((file for file in sorted(theirs - ours) if file.is_file()), None)


def _loaded(library: NvmlLibrary, maps: Path) -> set[Path]:
    """The library's files in this process: by its path, or as the loader mapped the soname."""
    name = str(getattr(library.nvmlLib, "_name", None) or "")
    if "/" in name:
        return {Path(name)}
    # ctypes keeps the soname as it was given; only the kernel knows the file behind it.
    text = ""
    with contextlib.suppress(OSError):
        text = maps.read_text(encoding="utf-8", errors="replace")
    return set(map(Path, _MAPPED.findall(text)))


def code(error: Exception) -> int:
    """The code of an NVMLError."""
    return int(getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN))


def is_unable(error: Exception) -> bool:
    """True when this GPU or driver does not support the call."""
    return _TROUBLES.get(code(error)) is Trouble.UNSUPPORTED


def driver_wide(error: Exception, *, about_gpu: bool = True) -> DriverError | None:
    """The DriverError for `error` if it concerns the whole driver, or None: it concerns one GPU."""
    if code(error) == pynvml.NVML_ERROR_UNINITIALIZED:
        return DriverError("the driver ended the session; a new one begins")
    # A GPU's device file may be closed to the agent, or its processes belong to another user.
    is_denied = about_gpu and code(error) == pynvml.NVML_ERROR_NO_PERMISSION
    reason, remedy = _MISSING.get(code(error), ("", ""))
    return DriverMissing(reason, remedy=remedy) if reason and not is_denied else None


def failure(error: Exception, gpu: str) -> DriverError | CallFailed:
    """What the error of a call means for `gpu`, which may be DRIVER."""
    is_silent = isinstance(error, TimeoutError)
    found = Trouble.SILENT if is_silent else _TROUBLES.get(code(error), Trouble.FAILED)
    text = cap(str(error)) or (NO_ANSWER if is_silent else f"error {code(error)}")
    if gpu != DRIVER:
        return CallFailed(gpu, text, found)
    what = "does not answer" if is_silent else "answers with an error"
    return DriverError(f"the driver {what}: {text}")


def text_of(value: str | bytes) -> str:
    """Decode a string of the library: fields of structures are bytes, results are str."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


# The threads that make calls, which may never return.

# Seconds between looks at calls that wait. While each thread is in a call, another is started.
PATIENCE: Final = 0.02


class _Call(msgspec.Struct, eq=False):
    """One call about a GPU. `end`: of its deadline, by the clock of Lag."""

    gpu: str
    work: Callable[[], Any]
    end: float
    answer: Any


class GpuThreads:
    """Runs blocking calls, of each GPU one after the other. Call all methods on the loop.

    - At rest one thread makes all calls, and wakes the loop once after the last of them. A call
      that does not return in PATIENCE keeps its thread, and a new thread makes those behind it.
    - A call that exceeds its deadline is given up. Further calls about that GPU are refused until
      it returns; then `on_return` is called.
    - A GPU's name is its UUID, or its index while the UUID is unknown: a GPU that hangs then may
      hold a second thread. One more name is for the whole driver.
    """

    def __init__(self, deadline: float, on_return: Callable[[], object] = lambda: None) -> None:
        self._deadline = deadline
        self._on_return = on_return
        self._loop = asyncio.get_running_loop()
        self._lag = Lag()
        # The call about each GPU that waits for a thread, is on one, or has just returned; those
        # that wait (None ends the thread that takes it); those that have returned, and what hands
        # each answer to its caller.
        self._calls: dict[str, _Call] = {}
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._inside: set[_Call] = set()
        self._returned: collections.deque[tuple[_Call, Callable[[], None]]] = collections.deque()
        self._threads = 0
        self._timer: asyncio.TimerHandle | None = None

    async def call(self, gpu: str, work: Callable[[], T], deadline: float | None = None) -> T:
        """Run `work` on a thread after earlier calls about that GPU; return or raise its result.

        Raises TimeoutError after the deadline, which starts again once the earlier calls have
        returned, and at once while one of them is stuck. A call goes on if its caller is cancelled.
        """
        with contextlib.suppress(TimeoutError):
            async with self._lag.within(self._deadline):
                while gpu in self._calls and not self._is_stuck(self._calls[gpu]):
                    await asyncio.wait([self._calls[gpu].answer])

        if gpu in self._calls:
            raise TimeoutError(f"an earlier call about {gpu} has not returned")

        seconds = deadline or self._deadline
        answer: asyncio.Future[T] = self._loop.create_future()
        call = _Call(gpu, work, self._lag.clock() + seconds - NOISE, answer)
        self._calls[gpu] = call
        self._queue.put(call)
        self._loop.call_soon(self._dispatch)

        async with self._lag.within(seconds):
            return await asyncio.shield(answer)

    async def drained(self) -> bool:
        """Wait until every call has left or exceeded its deadline. False: one is still inside."""
        while self._calls:
            left = max(call.end for call in self._calls.values()) - self._lag.clock()
            if left <= 0:
                return False
            await asyncio.wait([call.answer for call in self._calls.values()], timeout=left)
        return True

    def _is_stuck(self, call: _Call) -> bool:
        # By the time in which the loop ran: a starved process blames no GPU.
        return self._lag.clock() >= call.end

    def _dispatch(self) -> None:
        """Hand on what has returned, and start a thread if calls wait for those that hang."""
        if self._timer is not None:
            self._timer.cancel()

        # Before the answers are taken: a thread adds its answer and then takes the next call. If
        # it did so in between, the queue would seem empty here, and no timer would look again.
        is_empty = self._queue.empty()
        while self._returned:
            call, settle = self._returned.popleft()
            del self._calls[call.gpu]
            if self._is_stuck(call):
                self._loop.call_soon(self._on_return)
            settle()
            # Read here: asyncio would log an error where the caller was given up before.
            call.answer.exception()

        if is_empty:
            # After a hang is over, all threads but one end.
            for _ in range(self._threads - len(self._inside) - 1):
                self._queue.put(None)
                self._threads -= 1
            return

        # A thread that is in no call takes the next one. A busy machine may let it wait.
        if len(self._inside) >= self._threads:
            # The loop's own executor joins its threads at exit, and one that hangs would hold it.
            thread = threading.Thread(target=self._make_calls, name="nvml calls", daemon=True)
            # At a limit of the unit (TasksMax) it does not start: the next look tries again.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._threads += 1

        self._timer = self._loop.call_later(PATIENCE, self._dispatch)

    def _make_calls(self) -> None:
        """Make the calls that wait, until there are threads enough. Runs on a thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while (call := self._queue.get()) is not None:
                self._inside.add(call)
                try:
                    settle = partial(call.answer.set_result, call.work())
                except BaseException as error:  # noqa: BLE001 -- raised in the caller
                    settle = partial(call.answer.set_exception, error)
                self._inside.discard(call)
                self._returned.append((call, settle))
                # One wake-up of the loop for all calls of a round. If the next call hangs, the
                # timer hands on what this one has answered.
                if self._queue.empty():
                    self._loop.call_soon_threadsafe(self._dispatch)

            # What waited behind the last call may have been the word to end.
            self._loop.call_soon_threadsafe(self._dispatch)


# How the library and the kernel write what a GPU is.


def bus_id(text: str) -> str:
    """Convert a PCI bus id of NVML to the form of sysfs: at least four digits of the domain."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}" if rest else text.lower()


def numa_node(sys_root: Path, bus: str) -> int | None:
    """The NUMA node of a PCI address, or None when the kernel gives none."""
    try:
        node = int((sys_root / "bus/pci/devices" / bus / "numa_node").read_text("ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


_PATHS: Final[Mapping[int | None, PciPath]] = {60 - path: path for path in PciPath}
"""By NVML's topology level (nvmlGpuTopologyLevel_t): 0 for the same board, to 50 across CPUs."""

SWITCHES: Final = "switches"  # stands for the PCI bus ids of all NVSwitches

_RECOVERY: Final = dict(enumerate(RecoveryAction))  # as nvmlDeviceGpuRecoveryAction_t
_FABRIC: Final = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: FabricState.NOT_STARTED,
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: FabricState.IN_PROGRESS,
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: FabricState.COMPLETED,
}
_ECC: Final = (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)


# Which GPU has which index, and the driver's handle of each. Nothing else opens a GPU.
# The library opens a GPU with its first handle; for a handle by UUID it may open others too. A GPU
# stays open until all sessions end: until then nobody can reset it.

RELEASED = "it is released: hami-agent recheck takes it back"


class GpuTable:
    """Knows which GPU is at which index, and which may be opened; asks them, on their threads.

    - It outlives sessions: a GPU that is slow at the start of one is the same as before.
    - Once the indexes have changed, an index names a GPU only if that GPU answered there.
    - While a GPU is released, only the PCI addresses of the known GPUs are asked: indexes change
      when a GPU goes, and a GPU that was never described may be the released one.
    """

    def __init__(self, library: NvmlLibrary, sys_root: Path) -> None:
        self._library = library
        self._sys_root = sys_root
        self.count = 0  # how many GPUs the driver lists
        self._seen_count = 0
        self.described: frozenset[str] = frozenset()  # the addresses of all that ever were
        # The threads of the GPUs read these: they are only replaced, never changed.
        self._known: Mapping[GpuUuid, Gpu] = {}  # the GPUs as they were described last
        self.released: frozenset[GpuUuid] = frozenset()  # the GPUs that must not be opened

    def find(self, uuid: str) -> Gpu | None:
        """The GPU as it was described last, or None."""
        return self._known.get(GpuUuid(uuid))

    def released_fault(self, uuid: GpuUuid) -> GpuFault:
        """The fault by which a scan lists a released GPU."""
        index = self._known[uuid].index if uuid in self._known else NO_INDEX
        return GpuFault(uuid, RELEASED, Trouble.RELEASED, index)

    def name(self, index: int) -> str:
        """The UUID at `index` if it is known, else `index N`."""
        known = self._known.values()
        return next((gpu.uuid for gpu in known if gpu.index == index), f"{NAMELESS}{index}")

    def places(self) -> dict[str, int]:
        """The indexes that may be opened, by name."""
        if not self.released:
            return {self.name(index): index for index in range(self.count)}
        return {uuid: gpu.index for uuid, gpu in self._known.items() if uuid not in self.released}

    def seen(self, gpus: Collection[Gpu]) -> bool:
        """Note the GPUs as a scan of all described them. False when an index may have changed."""
        # When GPUs come or go, an index that was right a minute ago can name another GPU.
        fits = self._seen_count in {0, self.count} and all(
            self.name(gpu.index) in {gpu.uuid, f"{NAMELESS}{gpu.index}"}
            and self._known.get(gpu.uuid, gpu).index == gpu.index
            for gpu in gpus
        )
        self._seen_count = self.count
        self._known = {**(self._known if fits else {}), **{gpu.uuid: gpu for gpu in gpus}}
        return fits

    def release(self, uuids: Collection[GpuUuid], *, everything: bool) -> bool:
        """Let no thread open these GPUs from now on. Returns whether none may be opened.

        Raises GpuError for a GPU that was never described, unless `everything` is released.
        """
        unknown = set(uuids) - self._known.keys()
        if unknown and not everything:
            text = "the driver has not described it; only `hami-agent release all` releases it"
            raise GpuError(min(unknown), text)
        self.released |= set(uuids)
        return everything or self._known.keys() <= self.released

    # On the threads of the GPUs.

    def open(self, name: str, index: int = NO_INDEX) -> Handle:
        """Get the handle of GPU `index`, or with NO_INDEX by `name`, its UUID.

        While a GPU is released, only `name` counts. Raises NVMLError, GpuError: it is released.
        """
        if not self.released and index != NO_INDEX:
            return self._library.nvmlDeviceGetHandleByIndex(index)
        if not self.released:
            return self._library.nvmlDeviceGetHandleByUUID(name)

        gpu = self.find(name)
        if name in self.released or gpu is None:
            raise GpuError(name, RELEASED)

        # sysfs writes four digits of the domain, the library eight.
        domain, _, rest = gpu.pci.partition(":")
        return self._library.nvmlDeviceGetHandleByPciBusId(f"{domain:0>8}:{rest}".upper())

    def describe(self, name: str, index: int) -> Gpu:
        """Describe a GPU; its links are as before. Raises NVMLError, GpuError: it is released."""
        library, handle = self._library, self.open(name, index)
        bus = bus_id(text_of(library.nvmlDeviceGetPciInfo(handle).busId))
        # Of the two modes, the present and the pending one, only the first decides what containers
        # get. A GPU with the host's memory (GB10) does not report it.
        mig = self._maybe(library.nvmlDeviceGetMigMode, handle)
        memory = self._maybe(library.nvmlDeviceGetMemoryInfo, handle)
        uuid = GpuUuid(text_of(library.nvmlDeviceGetUUID(handle)))
        known = self.find(uuid)
        return Gpu(
            uuid=uuid,
            index=library.nvmlDeviceGetIndex(handle) if index == NO_INDEX else index,
            name=text_of(library.nvmlDeviceGetName(handle)),
            memory_mib=None if memory is None else int(memory.total) // MIB,
            pci=bus,
            numa=numa_node(self._sys_root, bus),
            minor=self._maybe(library.nvmlDeviceGetMinorNumber, handle),
            mig_enabled=mig is not None and bool(mig[0]),
            links=known.links if known else (),
        )

    def links(self, gpus: Iterable[Gpu], uuid: str, index: int) -> tuple[Link, ...]:
        """Read what connects a GPU to each of `gpus`. Raises NVMLError, GpuError."""
        library, handle = self._library, self.open(uuid, index)
        nvlinks: collections.Counter[str] = collections.Counter()
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            if not self._sign(library.nvmlDeviceGetNvLinkState, handle, link):
                continue  # it is down, or the GPU has no such link
            kind = self._maybe(library.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
            if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                nvlinks[SWITCHES] += 1
                continue

            info = self._maybe(library.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            if info is not None:
                nvlinks[bus_id(text_of(info.busId))] += 1

        links = []
        for peer in gpus:
            if peer.uuid != uuid:
                other = self.open(peer.uuid, peer.index)
                level = self._maybe(library.nvmlDeviceGetTopologyCommonAncestor, handle, other)
                # Over switches a GPU reaches every other one of its board.
                count = nvlinks[peer.pci] + nvlinks[SWITCHES]
                links.append(Link(peer.uuid, _PATHS.get(level), count))

        return tuple(links)

    def probe(self, uuid: GpuUuid) -> Probe:
        """Probe the GPU. Raises NVMLError, GpuError when it is released."""
        library, handle = self._library, self.open(uuid)
        self._maybe(library.nvmlDeviceGetMemoryInfo, handle)
        rows = self._sign(library.nvmlDeviceGetRemappedRows, handle)
        pending = self._sign(library.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        signs = GpuSigns(
            rows_pending=None if rows is None else bool(rows[2]),
            rows_failed=None if rows is None else bool(rows[3]),
            pages_pending=None if pending is None else bool(pending),
            recovery=self._sign(self._recovery, handle),
            fabric=self._sign(self._fabric, handle),
        )
        return Probe(uuid, ProbeOutcome.PASSED, signs=signs)

    def sample(self, uuid: GpuUuid) -> GpuSample:
        """Read how much the GPU is used. Raises NVMLError, GpuError."""
        library, handle = self._library, self.open(uuid)
        rates = self._sign(library.nvmlDeviceGetUtilizationRates, handle)
        # The first form counts what the driver reserves as used, so an idle H100 would have some
        # 600 MiB in use; drivers before 510 have no other.
        memory = self._sign(library.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
        if memory is None:
            memory = self._sign(library.nvmlDeviceGetMemoryInfo, handle)

        counts, span = library.nvmlDeviceGetTotalEccErrors, pynvml.NVML_AGGREGATE_ECC
        corrected, uncorrected = (self._sign(counts, handle, kind, span) for kind in _ECC)
        heat = library.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
        return GpuSample(
            uuid,
            gpu_percent=None if rates is None else int(rates.gpu),
            memory_percent=None if rates is None else int(rates.memory),
            used_mib=None if memory is None else int(memory.used) // MIB,
            reserved_mib=int(getattr(memory, "reserved", 0)) // MIB,
            celsius=self._sign(*heat),
            milliwatts=self._sign(library.nvmlDeviceGetPowerUsage, handle),
            ecc_corrected=corrected,
            ecc_uncorrected=uncorrected,
        )

    def unlisted(self) -> list[GpuFault]:
        """The GPUs of the kernel's driver that were never described; none if sysfs is hidden.

        The library passes over a GPU whose device file it cannot open, such as one that came after
        the start of the container.
        """
        bound = {link.name for link in (self._sys_root / "bus/pci/drivers/nvidia").glob("*:*:*.*")}
        text = "the kernel's driver has it, and its device file is missing or closed to the agent"
        return [GpuFault(bus, text, Trouble.UNLISTED) for bus in sorted(bound - self.described)]

    def _recovery(self, handle: Handle) -> RecoveryAction | None:
        """Raises NVMLError, also for the error of the field itself: drivers before 570 lack it."""
        value = self._library.nvmlDeviceGetFieldValues(handle, [FIELD_RECOVERY_ACTION])[0]
        if value.nvmlReturn:
            raise self._library.NVMLError(value.nvmlReturn)
        return _RECOVERY.get(int(value.value.uiVal), RecoveryAction.OTHER)

    def _fabric(self, handle: Handle) -> FabricState | None:
        info = pynvml.c_nvmlGpuFabricInfo_t()
        self._library.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
        if info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status:
            return FabricState.FAILED
        return _FABRIC.get(info.state)

    def _maybe(self, ask: Callable[..., T], *args: object, is_sign: bool = False) -> T | None:
        """Return the answer, or None if this GPU or driver does not support the call.

        A sign alone proves no fault: it is None also if the call fails in another way, unless the
        GPU is lost or must be reset, or the driver is gone. Raises other NVMLErrors.
        """
        try:
            return ask(*args)
        except self._library.NVMLError as error:
            is_grave = code(error) in _GRAVE or driver_wide(error) is not None
            if is_unable(error) or (is_sign and not is_grave):
                return None
            raise

    def _sign(self, ask: Callable[..., T], *args: object) -> T | None:
        return self._maybe(ask, *args, is_sign=True)
