"""Simulated GPUs: their models, facts, state and events, and the server of their control socket.

The state is only here, so that killing the agent repairs nothing. A GPU is named by index or UUID.
Time is the running loop's.
"""

import asyncio
import contextlib
import uuid
import weakref
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, get_args

import msgspec
import structlog
from aiohttp import web

from agent.errors import AgentError, DriverMissing, PermissionFault, SettingsError, cap
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


def described(spec: str) -> tuple[Gpu, ...]:
    """The GPUs that `PROFILE:COUNT` or `PROFILE` describes, by index. Raises SettingsError."""
    key, colon, count = spec.partition(":")
    if key not in PROFILES:
        names = ", ".join(PROFILES)
        raise SettingsError(f"--simulate {spec}: there is no profile `{key}`; use {names}")
    count = count if colon else "1"
    if not (count.isascii() and count.isdigit() and int(count) <= MOST_GPUS):
        raise SettingsError(f"--simulate {spec}: `{count}` is not a number up to {MOST_GPUS}")
    return _gpus_of(key, int(count))


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


Owner = tuple[str, str]
"""Pod UID and container name."""


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
    `uses`: the MiB and the percent of its time that the process of each owner uses.
    """

    gpu: Gpu
    lost: bool = False
    needs_reset: bool = False
    refused: bool = False
    xids: tuple[int, ...] = ()
    uses: dict[Owner, tuple[int, int]] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The state in words."""
        if self.lost:
            return "lost"
        return "needs reset" if self.needs_reset else "ok"


class SimulatedHardware:
    """The GPUs of one node and the driver's log of events."""

    def __init__(self, gpus: Collection[Gpu]) -> None:
        self._states = {gpu.uuid: SimulatedGpu(gpu) for gpu in gpus}
        self._listeners: weakref.WeakSet[asyncio.Queue[DriverEvent]] = weakref.WeakSet()
        self._serial = len(gpus)
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
        return Scan(DRIVER_VERSION, tuple(gpus), tuple(faults))

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
        uses = self._answering(uuid).uses.values()
        percent = min(100, sum(percent for _, percent in uses))
        return GpuSample(
            uuid,
            gpu_percent=percent,
            memory_percent=0,
            used_mib=sum(mib for mib, _ in uses),
            celsius=30 + percent // 2,
            milliwatts=70_000 + 6_000 * percent,
            ecc_corrected=0,
            ecc_uncorrected=0,
        )

    async def until_answering(self) -> None:
        """Wait while the driver hangs."""
        loop = asyncio.get_running_loop()
        while (left := self._hang_until - loop.time()) > 0:  # noqa: ASYNC110 -- it may get longer
            await asyncio.sleep(left)

    # Changes of the hardware.

    def use(self, name: str, owner: Owner, mib: int, percent: int) -> None:
        """A process of `owner` begins to use so many MiB of GPU `name`, and so much of its time."""
        self.find(name).uses[owner] = mib, percent

    def end_others(self, owners: Collection[Owner]) -> None:
        """Processes of all but these owners end."""
        for state in self.states:
            state.uses = {owner: use for owner, use in state.uses.items() if owner in owners}

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
        """GPU `name` is reset and comes back healthy before the next call."""
        state = self.find(name)
        state.lost = state.needs_reset = state.refused = False
        self._report(DriverEvent(EventKind.CHANGED))
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

    def subscribe(self) -> asyncio.Queue[DriverEvent]:
        """The events from now on, for as long as the queue is held. A hung driver reports none."""
        events = asyncio.Queue[DriverEvent]()
        self._listeners.add(events)
        return events

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
        for listener in self._listeners:
            listener.put_nowait(event)


# The server of the control socket of simulated hardware, for people and the agent's driver.
#
# A hung driver delays only the requests of the driver, not those of people.

FAREWELL: Final = 1.0
_DONE: Final = {
    "lose": "is lost",
    "refuse": "answers no more until it is reset",
    "restore": "is restored",
    "remove": "is unplugged",
}
log = structlog.get_logger(__name__)


@contextlib.asynccontextmanager
async def serve_hardware(hardware: SimulatedHardware, socket_path: Path) -> AsyncIterator[None]:
    """Serve `hardware` at `socket_path` (mode 0600) while the context lasts.

    Raises PermissionFault if the socket cannot be created or another simulation serves it.
    """
    with contextlib.suppress(DriverMissing):
        await talk.ask(socket_path, HardwareRequest("list"))
        raise PermissionFault(
            f"{socket_path}: another simulation serves this socket; stop it first"
        )

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        reply = await _reply(hardware, await request.read())
        if reply != talk.STREAM_BEGINS:
            return web.Response(body=_line(reply))
        events, response = hardware.subscribe(), web.StreamResponse()
        await response.prepare(request)
        await response.write(_line(reply))
        while True:  # until the peer is gone, which cancels this
            event = await events.get()
            await hardware.until_answering()
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
        socket_path.unlink(missing_ok=True)  # noqa: ASYNC240 -- one system call on a run directory
        await end_server(server, listener)


async def end_server(server: web.Server, listener: asyncio.Server) -> None:
    """Close the listener and cut every connection, even in the middle of an answer."""
    listener.close()
    for connection in server.connections:
        if connection.transport is not None:
            connection.transport.abort()
    await server.shutdown(FAREWELL)


def _line(reply: HardwareReply) -> bytes:
    return msgspec.json.encode(reply) + b"\n"


async def _reply(hardware: SimulatedHardware, body: bytes) -> HardwareReply:
    try:
        request = msgspec.json.decode(body, type=HardwareRequest)
        if request.verb in get_args(talk.DriverCall):
            await hardware.until_answering()
        return _act(hardware, request)
    except msgspec.MsgspecError as error:
        return HardwareReply(f"not a request: {cap(str(error))}", "malformed")
    except HardwareError as error:
        return HardwareReply(str(error), error.why)


def _act(hardware: SimulatedHardware, request: HardwareRequest) -> HardwareReply:
    """Answer the driver, or do what a person asks for. Raises HardwareError."""
    uuid = GpuUuid(request.gpu)
    match request.verb:
        case "scan":
            return HardwareReply("", scan=hardware.scan())
        case "probe":
            return HardwareReply("", probe=hardware.probe(uuid))
        case "sample":
            return HardwareReply("", sample=hardware.sample(uuid))
        case "events":
            return talk.STREAM_BEGINS
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
