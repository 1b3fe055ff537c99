"""Implements the driver port over the control socket of simulated hardware."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp

from agent.errors import DriverError, GpuError
from agent.model import DriverEvent, GpuSample, GpuUuid, Probe, Scan
from agent.sandbox import hardware_talk as talk
from agent.sandbox.hardware_talk import HardwareReply, HardwareRequest

REMOTE: Final = "unix:"
CALL_DEADLINE: Final = 2.0
"""Seconds for a call about one GPU, as for a real driver."""


class SimulatedDriver:
    """Implements agent.ports.Driver through the control socket of simulated hardware."""

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._closed = False
        self._streams: weakref.WeakSet[aiohttp.ClientResponse] = weakref.WeakSet()

    async def scan(self) -> Scan:
        """Describe all GPUs. Raises DriverMissing if there is no hardware, and DriverError."""
        reply = await self._ask(HardwareRequest("scan"))
        if reply.scan is None:
            raise _refused(reply)
        return reply.scan

    async def probe(self, uuid: GpuUuid) -> Probe:
        """Check that one GPU answers. Raises DriverError."""
        reply = await self._ask(HardwareRequest("probe", gpu=uuid))
        if reply.probe is None:
            raise _refused(reply)
        return reply.probe

    async def sample(self, uuid: GpuUuid) -> GpuSample:
        """The present use of one GPU. Raises GpuError, DriverMissing, DriverError."""
        try:
            async with asyncio.timeout(CALL_DEADLINE):
                reply = await self._ask(HardwareRequest("sample", gpu=uuid))
        except TimeoutError as error:
            raise GpuError(uuid, "no answer in time") from error
        if reply.failed in {"lost", "needs-reset"}:
            raise GpuError(uuid, reply.text, lost=reply.failed == "lost")
        if reply.sample is None:
            raise _refused(reply)
        return reply.sample

    async def events(self, opened: Callable[[], None] | None = None) -> AsyncIterator[DriverEvent]:
        """The driver's events. Raises DriverError when the hardware or this session ends.

        `opened` is called when the hardware confirms the stream.
        """
        self._refuse_closed()
        try:
            async with talk.answering(self._socket_path, HardwareRequest("events")) as answer:
                self._streams.add(answer)
                reply = await talk.next_reply(answer)
                if reply != talk.STREAM_BEGINS:
                    raise _refused(reply)
                if opened is not None:
                    opened()
                while (reply := await talk.next_reply(answer)).event is not None:
                    yield reply.event
                raise _refused(reply)
        except DriverError:
            self._refuse_closed()
            raise

    async def release(self, uuids: Collection[GpuUuid], *, everything: bool = False) -> None:
        """Do nothing: simulated hardware has no handles to close."""

    def check(self) -> None:
        """Do nothing: there is no library."""

    def take_back(self, uuid: GpuUuid) -> None:
        """Do nothing, as `release`."""

    async def renew(self) -> bool:
        """Return False: simulated hardware has no session to renew."""
        return False

    async def close(self) -> None:
        """End the session and its event streams. A second call does nothing."""
        self._closed = True
        while self._streams:
            self._streams.pop().close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise DriverError("the driver session was closed")

    async def _ask(self, request: HardwareRequest) -> HardwareReply:
        self._refuse_closed()
        return await talk.ask(self._socket_path, request)


async def look_once(spec: str) -> Scan:
    """Scan the hardware that `spec` names once, without a control socket.

    Raises SettingsError for a spec that cannot be used, DriverMissing, DriverError.
    """
    if not spec.startswith(REMOTE):
        from agent.sandbox.hardware import SimulatedHardware, described  # noqa: PLC0415 -- as below

        return SimulatedHardware(described(spec)).scan()
    return await SimulatedDriver(Path(spec.removeprefix(REMOTE))).scan()


def _refused(reply: HardwareReply) -> DriverError:
    if reply.failed:
        return DriverError(f"the simulated hardware refused: {reply.text}")
    return DriverError("the simulated hardware answered another request")


@asynccontextmanager
async def open_simulation(spec: str, *, socket_path: Path) -> AsyncIterator[SimulatedDriver]:
    """The driver over the hardware that `spec` (the value of --simulate) names.

    `h100:8`: the hardware lives in this process, for as long as the context lasts,
    with its control socket at `socket_path`. `unix:PATH`: it lives in another process.
    Raises SettingsError for a spec that cannot be used, PermissionFault for the socket.
    """
    async with AsyncExitStack() as stack:
        if spec.startswith(REMOTE):
            socket_path = Path(spec.removeprefix(REMOTE))
        else:
            # With hardware in another process, its module is not imported: an agent of the sandbox
            # starts as fast as with a real driver.
            from agent.sandbox import hardware as simulated  # noqa: PLC0415

            hardware = simulated.SimulatedHardware(simulated.described(spec))
            await stack.enter_async_context(simulated.serve_hardware(hardware, socket_path))
        driver = SimulatedDriver(socket_path)
        stack.push_async_callback(driver.close)
        yield driver
