"""The protocol of the control socket of simulated hardware, and its client.

One JSON object per line, a request or a reply; one connection per request. `hardware` has the
server.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec

from agent.errors import AgentError, cap
from agent.model import DriverEvent, GpuSample, GpuUuid, Probe, Scan

REQUEST_LIMIT: Final = 4096
REPLY_LIMIT: Final = 8 * 1024 * 1024

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class HardwareRequest(msgspec.Struct, tag_field="verb", forbid_unknown_fields=True, frozen=True):
    """A request."""


class NamedGpuRequest(HardwareRequest, frozen=True):
    """A request about one GPU, named by index or UUID."""

    gpu: _Name


class XidRequest(NamedGpuRequest, tag="xid", frozen=True):
    """A GPU reports an XID; 79 takes it off the bus."""

    xid: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class LoseRequest(NamedGpuRequest, tag="lose", frozen=True):
    """A GPU stops answering, without an event."""


class RefuseRequest(NamedGpuRequest, tag="refuse", frozen=True):
    """The driver refuses calls about a GPU until it is reset, without an event."""


class RestoreRequest(NamedGpuRequest, tag="restore", frozen=True):
    """A GPU or its slot is reset: it is healthy again."""


class HangRequest(HardwareRequest, tag="hang", frozen=True):
    """The driver answers nothing for a while."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)]


class AddRequest(HardwareRequest, tag="add", frozen=True):
    """A GPU is plugged in."""

    profile: _Name | None = None


class RemoveRequest(NamedGpuRequest, tag="remove", frozen=True):
    """A GPU is unplugged."""


class ListRequest(HardwareRequest, tag="list", frozen=True):
    """Show all GPUs."""


class ScanRequest(HardwareRequest, tag="scan", frozen=True):
    """The driver: scan all GPUs."""


class ProbeRequest(HardwareRequest, tag="probe", frozen=True):
    """The driver: probe one GPU."""

    gpu: GpuUuid


class SampleRequest(HardwareRequest, tag="sample", frozen=True):
    """The driver: sample the use of one GPU."""

    gpu: GpuUuid


class EventsRequest(HardwareRequest, tag="events", frozen=True):
    """The driver: from now on, every event; the connection serves nothing else afterwards."""


GpuRequest = XidRequest | LoseRequest | RefuseRequest | RestoreRequest | AddRequest | RemoveRequest
ControlRequest = GpuRequest | HangRequest | ListRequest
DriverRequest = ScanRequest | ProbeRequest | SampleRequest | EventsRequest
AnyRequest = ControlRequest | DriverRequest


class GpuRow(msgspec.Struct, frozen=True):
    """One GPU in a list. `state`: ok, lost, needs reset."""

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    pci: str
    numa: int | None
    state: str
    xids: tuple[int, ...] = ()


class Reply(msgspec.Struct, tag_field="reply", frozen=True):
    """A reply."""


class DoneReply(Reply, tag="done", frozen=True):
    """The request was performed. `gpus`: the GPUs that it changed; for a list, all."""

    text: str
    gpus: tuple[GpuRow, ...] = ()


class FailedReply(Reply, tag="failed", frozen=True):
    """The request failed. `reason`: malformed, unknown-gpu, lost, needs-reset or refused."""

    reason: str
    text: str


class ScanReply(Reply, tag="scan", frozen=True):
    """The scan of the driver."""

    scan: Scan


class ProbeReply(Reply, tag="probe", frozen=True):
    """The probe of the GPU."""

    probe: Probe


class SampleReply(Reply, tag="sample", frozen=True):
    """The sample of the GPU."""

    sample: GpuSample


class EventReply(Reply, tag="event", frozen=True):
    """One event of the driver. `event` None: the stream has begun."""

    event: DriverEvent | None = None


AnyReply = DoneReply | FailedReply | ScanReply | ProbeReply | SampleReply | EventReply


def encode(message: HardwareRequest | Reply) -> bytes:
    """The line, newline included."""
    return msgspec.json.encode(message) + b"\n"


def decode_request(line: bytes) -> AnyRequest:
    """The request in a line. Raises msgspec.MsgspecError, whose text names the field."""
    return msgspec.json.decode(line, type=AnyRequest)  # type: ignore[no-any-return, arg-type, unused-ignore]


def decode_reply(line: bytes) -> AnyReply:
    """The reply in a line. Raises msgspec.MsgspecError, whose text names the field."""
    return msgspec.json.decode(line, type=AnyReply)  # type: ignore[no-any-return, arg-type, unused-ignore]


# The client: one connection per request.


class HardwareUnreachable(AgentError):  # noqa: N818 -- the state, not the call, is the error
    """No process serves the control socket."""


class HardwareSilent(AgentError):  # noqa: N818 -- the state, not the call, is the error
    """The hardware closed the connection early or sent something that is not a reply."""


@asynccontextmanager
async def connection(
    socket_path: Path,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to the hardware at `socket_path`. Raises HardwareUnreachable."""
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path, limit=REPLY_LIMIT)
    except OSError as error:
        raise HardwareUnreachable(
            f"no simulated hardware answers at {socket_path} ({error.strerror or error}); "
            "is an agent with --simulate running?"
        ) from error
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ask(socket_path: Path, request: HardwareRequest) -> AnyReply:
    """The reply to `request`. The caller sets the deadline.

    Raises HardwareUnreachable, HardwareSilent.
    """
    async with connection(socket_path) as (reader, writer):
        writer.write(encode(request))
        return await read_reply(reader, socket_path)


async def read_reply(reader: asyncio.StreamReader, socket_path: Path) -> AnyReply:
    """The next reply on a connection. Raises HardwareSilent."""
    try:
        line = await reader.readline()
    except (ConnectionError, ValueError) as error:
        raise HardwareSilent(
            f"the connection to the simulated hardware at {socket_path} broke: {cap(str(error))}"
        ) from error
    if not line.endswith(b"\n"):
        raise HardwareSilent(f"the simulated hardware at {socket_path} ended the connection")
    try:
        return decode_reply(line)
    except msgspec.MsgspecError as error:
        raise HardwareSilent(
            f"the answer at {socket_path} is not one of simulated hardware: {cap(str(error))}"
        ) from error
