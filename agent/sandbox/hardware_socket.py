"""The server of the control socket of simulated hardware, for people and the agent's driver.

After a malformed line the connection stays. A hung driver delays only the requests of the driver,
not those of people.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import structlog

from agent.errors import AgentError, PermissionFault, cap
from agent.sandbox import hardware_talk as talk
from agent.sandbox.hardware import (
    LostGpuError,
    RefusedGpuError,
    SimulatedGpu,
    SimulatedHardware,
    UnknownGpuError,
)

FAREWELL: Final = 1.0
_REASONS: Final[Mapping[type[AgentError], str]] = {
    UnknownGpuError: "unknown-gpu",
    LostGpuError: "lost",
    RefusedGpuError: "needs-reset",
}

log = structlog.get_logger(__name__)


@asynccontextmanager
async def serve_hardware(hardware: SimulatedHardware, socket_path: Path) -> AsyncIterator[None]:
    """Serve `hardware` at `socket_path` (mode 0600) while the context lasts.

    Raises PermissionFault if the socket cannot be created or another simulation serves it.
    """
    await _refuse_a_second(socket_path)
    try:
        async with asyncio.TaskGroup() as tasks, _listening(hardware, socket_path, tasks):
            yield
    except BaseExceptionGroup as group:
        # Raise the caller's exception itself in place of the exception group of this module.
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None


@asynccontextmanager
async def _listening(
    hardware: SimulatedHardware, socket_path: Path, tasks: asyncio.TaskGroup
) -> AsyncIterator[None]:
    conversations: set[asyncio.Task[None]] = set()
    closing = False

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if closing:  # it had been accepted before the server was closed
            writer.transport.abort()
            return
        task = tasks.create_task(_Conversation(hardware, reader, writer).run())
        conversations.add(task)
        task.add_done_callback(conversations.discard)
        # A task that is cancelled before its first step closes nothing.
        task.add_done_callback(lambda _: writer.transport.abort())

    try:
        server = await asyncio.start_unix_server(accept, socket_path, limit=talk.REQUEST_LIMIT)
        socket_path.chmod(0o600)  # noqa: ASYNC240 -- one system call on a run directory
    except OSError as error:
        raise PermissionFault(
            f"{socket_path}: the control socket cannot be created: {error.strerror or error}"
        ) from error
    try:
        yield
    finally:
        closing = True
        for _ in range(2):  # asyncio loses a connection that it accepted just before close()
            await asyncio.sleep(0)
        server.close()
        socket_path.unlink(missing_ok=True)  # noqa: ASYNC240 -- one system call on a run directory
        for task in conversations:
            task.cancel()


async def _refuse_a_second(socket_path: Path) -> None:
    """Raise PermissionFault if a process listens on the socket. Remove a socket left behind."""
    with contextlib.suppress(talk.HardwareUnreachable):
        with contextlib.suppress(talk.HardwareSilent, TimeoutError):
            async with asyncio.timeout(FAREWELL):
                await talk.ask(socket_path, talk.ListRequest())
        raise PermissionFault(
            f"{socket_path}: another simulation serves this socket; stop it first"
        )


class _GoneError(Exception):
    """The peer has closed the connection."""


class _Conversation:
    """One connection: requests one after the other, or a stream of events."""

    def __init__(
        self,
        hardware: SimulatedHardware,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._hardware = hardware
        self._reader = reader
        self._writer = writer

    async def run(self) -> None:
        """Answer until the peer closes or sends an endless line."""
        # A peer that is gone needs no answer.
        with contextlib.suppress(_GoneError, ConnectionError):
            try:
                while (line := await self._reader.readline()).endswith(b"\n"):
                    await self._send(await self._answer(line))
            except ValueError:
                text = f"a request is longer than {talk.REQUEST_LIMIT} bytes; closing"
                await self._send(talk.FailedReply("malformed", text))
        self._writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(FAREWELL):
                await self._writer.wait_closed()

    async def _answer(self, line: bytes) -> talk.Reply:
        try:
            request = talk.decode_request(line)
        except msgspec.MsgspecError as error:
            return talk.FailedReply("malformed", f"not a request: {cap(str(error))}")
        try:
            if isinstance(request, talk.DriverRequest):
                return await self._drive(request)
            return self._control(request)
        except AgentError as error:
            return talk.FailedReply(_REASONS.get(type(error), "refused"), str(error))

    async def _drive(self, request: talk.DriverRequest) -> talk.Reply:
        """Answer a request of the driver; wait while the driver hangs."""
        while left := self._hardware.hanging:  # noqa: ASYNC110 -- it may be made to hang for longer
            await asyncio.sleep(left)
        match request:
            case talk.ScanRequest():
                return talk.ScanReply(self._hardware.scan())
            case talk.ProbeRequest(gpu=gpu):
                return talk.ProbeReply(self._hardware.probe(gpu))
            case talk.SampleRequest(gpu=gpu):
                return talk.SampleReply(self._hardware.sample(gpu))
            case talk.EventsRequest():
                await self._stream()
                raise _GoneError

    def _control(self, request: talk.ControlRequest) -> talk.Reply:
        """Perform a request of a person at once. Raises UnknownGpuError, HardwareError."""
        hardware = self._hardware
        match request:
            case talk.HangRequest(seconds=seconds):
                hardware.hang(seconds)
                log.info("simulation.hang", seconds=seconds)
                return talk.DoneReply(f"the driver answers nothing for {seconds:g} s")
            case talk.ListRequest():
                rows = tuple(_row(state) for state in hardware.states)
                return talk.DoneReply(f"{len(rows)} GPUs", rows)
            case talk.XidRequest(gpu=gpu, xid=number):
                what, state = f"reported XID {number}", hardware.xid(gpu, number)
            case talk.LoseRequest(gpu=gpu):
                what, state = "is lost", hardware.lose(gpu)
            case talk.RefuseRequest(gpu=gpu):
                what, state = "answers no more until it is reset", hardware.refuse(gpu)
            case talk.RestoreRequest(gpu=gpu):
                what, state = "is being restored", hardware.restore(gpu)
            case talk.RemoveRequest(gpu=gpu):
                what, state = "is unplugged", hardware.remove(gpu)
            case _:
                what, state = "is plugged in", hardware.add(request.profile)
        log.info("simulation.action", gpu=state.gpu.uuid, what=what, state=state.words)
        return talk.DoneReply(f"GPU {state.gpu.index} ({state.gpu.uuid}) {what}", (_row(state),))

    async def _stream(self) -> None:
        """Send events while the peer is connected. Ignore what it sends."""
        cursor = self._hardware.subscribe()
        await self._send(talk.EventReply())

        async def pump() -> None:
            while True:
                for event in await cursor.next():
                    await self._send(talk.EventReply(event))

        try:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(pump())
                while await self._reader.read(talk.REQUEST_LIMIT):
                    pass
                task.cancel()
        except* ConnectionError:
            log.debug("simulation.peer_gone")

    async def _send(self, reply: talk.Reply) -> None:
        self._writer.write(talk.encode(reply))
        await self._writer.drain()


def _row(state: SimulatedGpu) -> talk.GpuRow:
    gpu = state.gpu
    return talk.GpuRow(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_mib=gpu.memory_mib,
        pci=gpu.pci,
        numa=gpu.numa,
        state=state.words,
        xids=state.xids,
    )
