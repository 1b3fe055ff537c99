"""Simulated GPUs: their models, facts, state and events, and the server of their control socket.

The state is only here, so that killing the agent repairs nothing. A GPU is named by index or UUID.
Time is the running loop's.
"""

import asyncio
import uuid
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, get_args

import msgspec
import structlog
from aiohttp import web

from agent.errors import AgentError, DriverError, DriverMissing, PermissionFault, SettingsError, cap
from agent.health.judge import XidClass, xid_class
from agent.model import (
    DriverEvent,
    EventKind,
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
    Scan,
    Trouble,
)
from agent.sandbox import hardware_talk as talk
from agent.sandbox.hardware_talk import GpuRow, HardwareReply, HardwareRequest

DRIVER_VERSION: Final = "570.148.08"
UUID_NAMESPACE: Final = uuid.UUID("6f1d0a52-8d3c-5b0e-9a77-2f4b6c1e8d90")
"""The namespace of derived GPU UUIDs: the same description always gives the same UUIDs."""

MOST_GPUS: Final = 64
"""The most GPUs of a description. No node has more, so a larger count is a typing error."""
LOST: Final = "GPU is lost"
REFUSED: Final = "GPU requires restart"
"""The error text of the library."""
RESET_TIME: Final = 1.0
"""Seconds for which a GPU is lost during its reset."""


class GpuProfile(NamedTuple):
    """One GPU model; name and memory are NVML's values.

    `nvlinks` connect each two GPUs of `linked` neighbours: a bridge has 2, a switch all.
    """

    name: str
    memory_mib: int
    nvlinks: int = 0
    linked: int = MOST_GPUS


PROFILES: Final[Mapping[str, GpuProfile]] = {
    "h100": GpuProfile("NVIDIA H100 80GB HBM3", 81559, 18),
    "a100": GpuProfile("NVIDIA A100-SXM4-80GB", 81920, 12),
    "t4": GpuProfile("Tesla T4", 15360),
    "rtx3090": GpuProfile("NVIDIA GeForce RTX 3090", 24576, 4, linked=2),
}


class Description(msgspec.Struct, frozen=True):
    """The hardware of one node at power-on. GPUs are sorted by index."""

    driver_version: str
    gpus: tuple[Gpu, ...]


def described(spec: str) -> Description:
    """The hardware that `PROFILE:COUNT` or `PROFILE` describes. Raises SettingsError."""
    key, colon, count = spec.partition(":")
    if key not in PROFILES:
        names = ", ".join(PROFILES)
        raise SettingsError(f"--simulate {spec}: there is no profile `{key}`; use {names}")
    count = count if colon else "1"
    if not (count.isascii() and count.isdigit() and int(count) <= MOST_GPUS):
        raise SettingsError(f"--simulate {spec}: `{count}` is not a number up to {MOST_GPUS}")
    return Description(DRIVER_VERSION, _gpus_of(key, int(count)))


def _derived_uuid(seed: str) -> GpuUuid:
    return GpuUuid(f"GPU-{uuid.uuid5(UUID_NAMESPACE, seed)}")


def _pci_address(slot: int, numa: int) -> str:
    """A bus address as sysfs writes it: one bus per slot, the second socket from 0x80 on."""
    return f"0000:{0x80 * min(numa, 1) + 0x10 + slot % 0x70:02x}:00.0"


def _gpus_of(key: str, count: int) -> tuple[Gpu, ...]:
    """`count` GPUs of one model, half of them on each socket, with the model's NVLinks."""
    profile = PROFILES[key]
    sockets = [0 if 2 * index < count else 1 for index in range(count)]
    uuids = [_derived_uuid(f"{key}/{index}") for index in range(count)]

    def link(index: int, peer: int) -> Link:
        path = PciPath.SAME_CPU if sockets[index] == sockets[peer] else PciPath.CROSS_CPU
        is_linked = index // profile.linked == peer // profile.linked
        return Link(uuids[peer], path, profile.nvlinks if is_linked else 0)

    return tuple(
        Gpu(
            uuid=uuids[index],
            index=index,
            name=profile.name,
            memory_mib=profile.memory_mib,
            pci=_pci_address(index, sockets[index]),
            numa=sockets[index],
            minor=index,
            links=tuple(link(index, peer) for peer in range(count) if peer != index),
        )
        for index in range(count)
    )


class HardwareError(AgentError):
    """The hardware has no answer, or cannot do what was requested; nothing changed.

    `why`: unknown-gpu, lost, needs-reset or refused.
    """

    def __init__(self, text: str, why: str = "refused") -> None:
        super().__init__(text)
        self.why: Final = why


@dataclass(slots=True)
class SimulatedGpu:
    """One simulated GPU. `xids`: all XIDs that it has reported.

    `lost`: it does not answer. `refused`: the driver only answers that it must be reset.
    `used_mib`, `percent`: what processes use of it.
    """

    gpu: Gpu
    lost: bool = False
    needs_reset: bool = False
    refused: bool = False
    xids: tuple[int, ...] = ()
    used_mib: int = 0
    percent: int = 0

    @property
    def words(self) -> str:
        """The state in words."""
        if self.lost:
            return "lost"
        return "needs reset" if self.needs_reset else "ok"


class SimulatedHardware:
    """The GPUs of one node and the driver's log of events."""

    def __init__(self, description: Description) -> None:
        self.driver_version = description.driver_version
        self._states = {gpu.uuid: SimulatedGpu(gpu) for gpu in description.gpus}
        self._cursors: weakref.WeakSet[EventCursor] = weakref.WeakSet()
        self._serial = len(description.gpus)
        self._hang_until = 0.0

    @property
    def states(self) -> tuple[SimulatedGpu, ...]:
        """All GPUs, sorted by index."""
        return tuple(sorted(self._states.values(), key=lambda state: state.gpu.index))

    def find(self, name: str) -> SimulatedGpu:
        """The GPU with that index or UUID. Raises HardwareError: the text lists the known ones."""
        for state in self._states.values():
            if name in {state.gpu.uuid, str(state.gpu.index)}:
                return state
        known = ", ".join(f"{state.gpu.index} ({state.gpu.uuid})" for state in self.states)
        text = f"there is no GPU `{name}`; the GPUs are: {known or 'none'}"
        raise HardwareError(text, "unknown-gpu")

    # Calls of the driver.

    def scan(self) -> Scan:
        """The scan that the driver returns. Lost GPUs are faults."""
        gpus, faults = list[Gpu](), list[GpuFault]()
        for state in self.states:
            if state.lost or state.refused:
                said = (LOST, Trouble.LOST) if state.lost else (REFUSED, Trouble.RESET)
                faults.append(GpuFault(state.gpu.uuid, *said, state.gpu.index))
            else:
                gpus.append(state.gpu)
        return Scan(self.driver_version, tuple(gpus), tuple(faults))

    def probe(self, uuid: GpuUuid) -> Probe:
        """The probe of one GPU that the driver returns."""
        try:
            state = self._answering(uuid)
        except HardwareError as error:
            is_lost = error.why == "lost"
            outcome = ProbeOutcome.LOST if is_lost else ProbeOutcome.REFUSED
            return Probe(uuid, outcome, str(error))
        recovery = RecoveryAction.GPU_RESET if state.needs_reset else RecoveryAction.NONE
        signs = GpuSigns(rows_pending=False, rows_failed=False, recovery=recovery)
        return Probe(uuid, ProbeOutcome.PASSED, signs=signs)

    def sample(self, uuid: GpuUuid) -> GpuSample:
        """The use of the GPU. Raises HardwareError."""
        state = self._answering(uuid)
        return GpuSample(
            uuid,
            gpu_percent=state.percent,
            memory_percent=0,
            used_mib=state.used_mib,
            celsius=30 + state.percent // 2,
            milliwatts=70_000 + 6_000 * state.percent,
            ecc_corrected=0,
            ecc_uncorrected=0,
        )

    async def until_answering(self) -> None:
        """Wait while the driver hangs."""
        loop = asyncio.get_running_loop()
        while (left := self._hang_until - loop.time()) > 0:  # noqa: ASYNC110 -- it may get longer
            await asyncio.sleep(left)

    # Changes of the hardware.

    def use(self, name: str, mib: int, percent: int) -> SimulatedGpu:
        """A process on GPU `name` begins to use so many MiB, and so much of its time."""
        state = self.find(name)
        state.used_mib += mib
        state.percent = min(100, state.percent + percent)
        return state

    def xid(self, name: str, number: int) -> SimulatedGpu:
        """GPU `name` reports XID `number` and gets the state that follows from it."""
        state = self.find(name)
        state.lost |= number == 79  # it has fallen off the bus
        state.needs_reset |= xid_class(number) is XidClass.NEEDS_RESET
        state.xids = (*state.xids, number)[-100:]
        self._report(DriverEvent(EventKind.XID, state.gpu.uuid, number))
        return state

    def lose(self, name: str) -> SimulatedGpu:
        """GPU `name` stops answering without an event, as when its power fails."""
        state = self.find(name)
        state.lost = True
        return state

    def refuse(self, name: str) -> SimulatedGpu:
        """The driver refuses calls for GPU `name` until it is reset, without an event."""
        state = self.find(name)
        state.needs_reset = state.refused = True
        return state

    def restore(self, name: str) -> SimulatedGpu:
        """GPU `name` is reset and comes back healthy.

        A GPU that needs a reset is lost for RESET_TIME first, as a real one. A refused GPU is not:
        its reset ends before the next call.
        """
        state = self.find(name)
        if state.needs_reset and not (state.lost or state.refused):
            state.lost = True
            asyncio.get_running_loop().call_later(RESET_TIME, self._end_reset, state)
            self._report(DriverEvent(EventKind.CHANGED))
        else:
            self._end_reset(state)
        return state

    def hang(self, seconds: float) -> None:
        """The driver neither answers nor reports for `seconds`. The control socket still works."""
        until = asyncio.get_running_loop().time() + seconds
        self._hang_until = max(self._hang_until, until)

    def add(self, profile: str | None = None) -> SimulatedGpu:
        """A GPU is plugged in: of `profile`, else like the first one, else an h100."""
        taken = {state.gpu.index for state in self._states.values()}
        index = next(n for n in range(MOST_GPUS + 1) if n not in taken)
        if index == MOST_GPUS:
            raise HardwareError(f"this node is full: it has {MOST_GPUS} GPUs")
        if profile is not None and profile not in PROFILES:
            raise HardwareError(f"there is no profile `{profile}`; use {', '.join(PROFILES)}")
        model = _gpus_of(profile or "h100", 1)[0]
        if profile is None and self._states:
            model = self.states[0].gpu
        uuid, pci = _derived_uuid(f"added/{self._serial}"), _pci_address(index, model.numa or 0)
        self._serial += 1
        gpu = msgspec.structs.replace(model, uuid=uuid, index=index, minor=index, pci=pci, links=())
        state = self._states[gpu.uuid] = SimulatedGpu(gpu)
        self._report(DriverEvent(EventKind.CHANGED))
        return state

    def remove(self, name: str) -> SimulatedGpu:
        """GPU `name` is unplugged: the driver no longer lists it."""
        state = self._states.pop(self.find(name).gpu.uuid)
        for other in self.states:
            links = tuple(link for link in other.gpu.links if link.peer != state.gpu.uuid)
            other.gpu = msgspec.structs.replace(other.gpu, links=links)
        self._report(DriverEvent(EventKind.CHANGED))
        return state

    # The log of events.

    def subscribe(self) -> "EventCursor":
        """A reader of the events from now on."""
        cursor = EventCursor(self)
        self._cursors.add(cursor)
        return cursor

    def _answering(self, uuid: GpuUuid) -> SimulatedGpu:
        state = self._states.get(uuid)
        if state is None:
            raise HardwareError("the driver knows no such GPU", "lost")
        if state.lost:
            raise HardwareError(LOST, "lost")
        if state.refused:
            raise HardwareError(REFUSED, "needs-reset")
        return state

    def _report(self, event: DriverEvent) -> None:
        for cursor in self._cursors:
            cursor.waiting.put_nowait(event)

    def _end_reset(self, state: SimulatedGpu) -> None:
        state.lost = state.needs_reset = state.refused = False
        self._report(DriverEvent(EventKind.CHANGED))


class EventCursor:
    """One subscriber, with the events that it has not taken yet."""

    def __init__(self, hardware: SimulatedHardware) -> None:
        self._hardware = hardware
        self.waiting: asyncio.Queue[DriverEvent] = asyncio.Queue()

    async def next(self) -> tuple[DriverEvent, ...]:
        """Wait for the next events, at least one."""
        first = await self.waiting.get()
        await self._hardware.until_answering()
        return (first, *(self.waiting.get_nowait() for _ in range(self.waiting.qsize())))


# The server of the control socket of simulated hardware, for people and the agent's driver.
#
# A hung driver delays only the requests of the driver, not those of people.

FAREWELL: Final = 1.0
_DONE: Final = {
    "lose": "is lost",
    "refuse": "answers no more until it is reset",
    "restore": "is being restored",
    "remove": "is unplugged",
}
log = structlog.get_logger(__name__)


@asynccontextmanager
async def serve_hardware(hardware: SimulatedHardware, socket_path: Path) -> AsyncIterator[None]:
    """Serve `hardware` at `socket_path` (mode 0600) while the context lasts.

    Raises PermissionFault if the socket cannot be created or another simulation serves it.
    """
    await _refuse_a_second(socket_path)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        reply = await _reply(hardware, await request.read())
        if reply != talk.STREAM_BEGINS:
            return web.Response(body=_line(reply))
        cursor, response = hardware.subscribe(), web.StreamResponse()
        await response.prepare(request)
        await response.write(_line(reply))
        while True:  # until the peer is gone, which cancels this
            for event in await cursor.next():
                await response.write(_line(HardwareReply("", event=event)))

    server = web.Server(answer, handler_cancellation=True, access_log=None)
    try:
        listener = await asyncio.get_running_loop().create_unix_server(server, socket_path)
        socket_path.chmod(0o600)  # noqa: ASYNC240 -- one system call on a run directory
    except OSError as error:
        why = f"the control socket cannot be created: {error.strerror or error}"
        raise PermissionFault(f"{socket_path}: {why}") from error
    try:
        yield
    finally:
        listener.close()
        socket_path.unlink(missing_ok=True)  # noqa: ASYNC240 -- one system call on a run directory
        for connection in server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await server.shutdown(FAREWELL)


async def _refuse_a_second(socket_path: Path) -> None:
    """Raise PermissionFault if a process listens on the socket."""
    try:
        async with asyncio.timeout(FAREWELL):
            await talk.ask(socket_path, HardwareRequest("list"))
    except DriverMissing:
        return
    except (DriverError, TimeoutError):
        pass
    raise PermissionFault(f"{socket_path}: another simulation serves this socket; stop it first")


def _line(reply: HardwareReply) -> bytes:
    return msgspec.json.encode(reply) + b"\n"


async def _reply(hardware: SimulatedHardware, body: bytes) -> HardwareReply:
    try:
        request = msgspec.json.decode(body, type=HardwareRequest)
        if request.verb in get_args(talk.DriverCall):
            return await _drive(hardware, request)
        return _control(hardware, request)
    except msgspec.MsgspecError as error:
        return HardwareReply(f"not a request: {cap(str(error))}", "malformed")
    except HardwareError as error:
        return HardwareReply(str(error), error.why)


async def _drive(hardware: SimulatedHardware, request: HardwareRequest) -> HardwareReply:
    """Answer a request of the driver; wait while the driver hangs."""
    uuid = GpuUuid(request.gpu)
    await hardware.until_answering()
    match request.verb:
        case "scan":
            return HardwareReply("", scan=hardware.scan())
        case "probe":
            return HardwareReply("", probe=hardware.probe(uuid))
        case "sample":
            return HardwareReply("", sample=hardware.sample(uuid))
        case _:
            return talk.STREAM_BEGINS


def _control(hardware: SimulatedHardware, request: HardwareRequest) -> HardwareReply:
    """Do what a person asks for at once. Raises HardwareError."""
    match request.verb:
        case "hang":
            hardware.hang(request.seconds)
            log.info("simulation.hang", seconds=request.seconds)
            return HardwareReply(f"the driver answers nothing for {request.seconds:g} s")
        case "list":
            rows = tuple(_row(state) for state in hardware.states)
            return HardwareReply(f"{len(rows)} GPUs", gpus=rows)
        case "xid":
            what = f"reported XID {request.xid}"
            state = hardware.xid(request.gpu, request.xid)
        case "add":
            what, state = "is plugged in", hardware.add(request.profile)
        case verb:
            what = _DONE[verb]
            state = getattr(hardware, verb)(request.gpu)
    log.info("simulation.action", gpu=state.gpu.uuid, what=what, state=state.words)
    return HardwareReply(f"GPU {state.gpu.index} ({state.gpu.uuid}) {what}", gpus=(_row(state),))


def _row(state: SimulatedGpu) -> GpuRow:
    gpu = state.gpu
    shown = {name: getattr(gpu, name) for name in ("index", "uuid", "name", "memory_mib", "pci")}
    return GpuRow(**shown, numa=gpu.numa, state=state.words, xids=state.xids)
