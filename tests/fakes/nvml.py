"""A module of pynvml's shape: GPUs that answer, fail, hang and report as a test says.

Hanging blocks the calling thread until `release()`, as a driver does.
"""
# ruff: noqa: N802, N803, N815 -- the names are pynvml's

import asyncio
import contextlib
import ctypes
import dataclasses
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence

UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
FUNCTION_NOT_FOUND = 13
NOT_FOUND = 6
TIMEOUT = 10
GPU_IS_LOST = 15

_TEXTS = {1: "Uninitialized", 3: "Not Supported", 6: "Not Found"}
_TEXTS |= {15: "GPU is lost", 16: "GPU requires restart"}


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(_TEXTS.get(value, f"error {value}"))
        self.value = value


@dataclasses.dataclass
class FakeGpu:
    uuid: str
    bus: bytes = b"00000000:1B:00.0"
    minor: int = 0
    mig: int = 0
    links: Sequence[tuple[int, bytes]] = ()
    """(remote type: 0 GPU, 2 switch; remote bus id) of each active NVLink."""
    rows_failed: int = 0
    recovery: int | None = 0
    """None: the driver does not know the field."""
    event_types: int = 0x8 | 0x2 | 0x10


@dataclasses.dataclass
class NvmlAnswer:
    """A structure: whatever fields a call fills."""

    total: int = 0
    used: int = 0
    gpu: int = 0
    memory: int = 0
    nvmlReturn: int = 0
    uiVal: int = 0
    value: object = None
    busId: bytes = b""
    device: object = None
    eventType: int = 0
    eventData: int = 0


def _unable(*_: object) -> None:
    raise NVMLError(NOT_SUPPORTED)


def _memory(_: FakeGpu, version: object = None) -> NvmlAnswer:
    if version is not None:
        raise NVMLError(FUNCTION_NOT_FOUND)
    return NvmlAnswer(total=81559 << 20)


ANSWERS: dict[str, Callable] = {
    "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
    "nvmlDeviceGetName": lambda gpu: "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetPciInfo": lambda gpu: NvmlAnswer(busId=gpu.bus),
    "nvmlDeviceGetMinorNumber": lambda gpu: gpu.minor,
    "nvmlDeviceGetMigMode": lambda gpu: [gpu.mig, gpu.mig],
    "nvmlDeviceGetRemappedRows": lambda gpu: (0, 0, 0, gpu.rows_failed),
    "nvmlDeviceGetRetiredPagesPendingStatus": lambda gpu: 0,
    "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, span: _unable() if span else 0,
    "nvmlDeviceGetTemperature": _unable,
    "nvmlDeviceGetPowerUsage": _unable,
    "nvmlDeviceGetGpuFabricInfo": _unable,
    "nvmlDeviceGetUtilizationRates": lambda gpu: NvmlAnswer(),
    "nvmlDeviceGetNvLinkState": lambda gpu, link: link < len(gpu.links) if gpu.links else _unable(),
    "nvmlDeviceGetNvLinkRemotePciInfo": lambda gpu, link: NvmlAnswer(busId=gpu.links[link][1]),
    "nvmlDeviceGetNvLinkRemoteDeviceType": lambda gpu, link: gpu.links[link][0],
    "nvmlDeviceGetSupportedEventTypes": lambda gpu: gpu.event_types,
}
"""What a GPU tells, by call."""


class FakeNvml:
    """`failures[call, index]` is an error code; index None: the call fails whoever it is about."""

    NVMLError: type[Exception] = NVMLError

    def __init__(self, gpus: Sequence[FakeGpu]) -> None:
        self.nvmlLib: object = None
        self.gpus = list(gpus)
        self.failures: dict[tuple[str, int | None], int] = {}
        self.hanging: set[tuple[str, int | None]] = set()
        self.calls: Counter[str] = Counter()
        self.open = 0
        self.undefined = 0
        """Calls that met a shutdown of the library, which promises nothing for them."""
        self.sets_freed = 0
        self.field_code = 0
        """The error of each single field."""
        self.registered: dict[int, int] = {}
        self._forgetful: set[int] = set()
        self.level = 50
        self._released = threading.Event()
        self._cells = [ctypes.c_int(index) for index in range(64)]
        self._events: queue.Queue[NvmlAnswer | int] = queue.Queue()
        self._lock = threading.Lock()
        self._ending = 0
        self.inside = 0

    # What a test does.

    def release(self) -> None:
        """Every hanging call comes back."""
        self.hanging.clear()
        self._released.set()

    def reset(self, index: int) -> None:
        """GPU `index`, lost or refused before, answers again and reports nothing unasked."""
        del self.failures["*", index]
        self._forgetful.add(index)

    def xid(self, index: int, number: int) -> None:
        """GPU `index` reports an XID."""
        self.report(index, 0x8, number)

    def report(self, index: int, kind: int, data: int = 0) -> None:
        """GPU `index` reports an event of any kind; after a reset only if it was asked again."""
        if index in self._forgetful:
            return
        device = ctypes.pointer(self._cells[index])
        self._events.put(NvmlAnswer(device=device, eventType=kind, eventData=data))

    def fail_wait(self, code: int) -> None:
        """The running or next wait for events fails."""
        self._events.put(code)

    # What the adapter calls.

    def nvmlInit(self):
        self._enter("nvmlInit", None)
        self.open += 1

    def nvmlShutdown(self):
        if not self.open:
            raise NVMLError(UNINITIALIZED)
        with self._lock:
            self._ending += 1
            self.undefined += self.inside
        try:
            self._enter("nvmlShutdown", None)
            self.open -= 1
        finally:
            with self._lock:
                self._ending -= 1

    def nvmlSystemGetDriverVersion(self):
        self._enter("nvmlSystemGetDriverVersion", None)
        return "570.148.08"

    def nvmlDeviceGetCount(self):
        self._enter("nvmlDeviceGetCount", None)
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        self._enter("nvmlDeviceGetHandleByIndex", index)
        return ctypes.pointer(self._cells[index])

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for index, gpu in enumerate(self.gpus):
            if gpu.uuid == uuid:
                self._enter("nvmlDeviceGetHandleByUUID", index)
                return ctypes.pointer(self._cells[index])
        raise NVMLError(NOT_FOUND)

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId):
        buses = [gpu.bus.decode() for gpu in self.gpus]
        return self.nvmlDeviceGetHandleByIndex(buses.index(pciBusId))

    def __getattr__(self, call: str) -> Callable:
        """A call that only tells something of a GPU."""
        if call not in ANSWERS:
            raise AttributeError(call)
        return lambda handle, *more: ANSWERS[call](self._gpu(call, handle), *more)

    def nvmlDeviceGetTopologyCommonAncestor(self, device1, device2):
        self._gpu("nvmlDeviceGetTopologyCommonAncestor", device1)
        return self.level

    def nvmlDeviceGetFieldValues(self, handle, fieldIds):
        recovery = self._gpu("nvmlDeviceGetFieldValues", handle).recovery
        if self.field_code:
            return [NvmlAnswer(nvmlReturn=self.field_code)]
        if recovery is None:
            return [NvmlAnswer(nvmlReturn=NOT_SUPPORTED)]
        return [NvmlAnswer(value=NvmlAnswer(uiVal=recovery))]

    def nvmlDeviceRegisterEvents(self, handle, eventTypes, eventSet):
        self._gpu("nvmlDeviceRegisterEvents", handle)
        if not eventTypes:
            raise NVMLError(INVALID_ARGUMENT)
        self.registered[handle.contents.value] = eventTypes
        self._forgetful.discard(handle.contents.value)

    def nvmlEventSetCreate(self):
        self._enter("nvmlEventSetCreate", None)
        return object()

    def nvmlEventSetWait_v2(self, eventSet, timeoutms):
        self._enter("nvmlEventSetWait_v2", None)
        try:
            with self._visit():
                event = self._events.get(timeout=timeoutms / 1000 / 25)
        except queue.Empty:
            raise NVMLError(TIMEOUT) from None
        if isinstance(event, int):
            raise NVMLError(event)
        return event

    def nvmlEventSetFree(self, eventSet):
        self.sets_freed += 1

    def _gpu(self, call: str, handle) -> FakeGpu:
        index = handle.contents.value
        self._enter(call, index)
        return self.gpus[index]

    @contextlib.contextmanager
    def _visit(self):
        """For as long as a thread is in a call."""
        with self._lock:
            self.inside += 1
        try:
            yield
        finally:
            with self._lock:
                self.inside -= 1

    def _enter(self, call: str, index: int | None) -> None:
        with self._lock:
            self.calls[call] += 1
            self.undefined += bool(self._ending and call != "nvmlShutdown")
        for key in ((call, index), (call, None), ("*", index)):
            if key in self.hanging:
                with self._visit():
                    self._released.wait()
            if key in self.failures:
                raise NVMLError(self.failures[key])


async def until(holds: Callable[[], bool], within: float = 10.0) -> None:
    """Wait until it holds, on real time: nothing tells when a thread has moved."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while not holds():
        assert loop.time() < end
        await asyncio.sleep(0.005)
