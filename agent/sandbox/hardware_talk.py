"""The protocol of the control socket of simulated hardware, and its client.

A request is posted over HTTP as a JSON object; the answer has one reply a line. `hardware` has the
server.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Final, Literal

import aiohttp
import msgspec

from agent.errors import DriverError, DriverMissing, cap
from agent.model import DriverEvent, GpuSample, Probe, Scan

REPLY_LIMIT: Final = 8 * 1024 * 1024

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Action = Literal["xid", "lose", "refuse", "restore", "remove", "hang", "add", "list"]
"""What people ask for."""
DriverCall = Literal["scan", "probe", "sample", "events"]
"""What the agent's driver asks for. After `events` the connection carries nothing else."""


class HardwareRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """A request. `gpu`: by index or UUID; the driver's requests name the UUID."""

    verb: Action | DriverCall
    gpu: _Name = ""
    xid: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 0
    seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 0.0
    profile: _Name | None = None


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


class HardwareReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """A reply: what was done, in words, with the GPUs that it changed, or what the driver answers.

    `failed`: malformed, unknown-gpu, lost, needs-reset or refused; `text` then says why.
    """

    text: str
    failed: str = ""
    gpus: tuple[GpuRow, ...] = ()
    scan: Scan | None = None
    probe: Probe | None = None
    sample: GpuSample | None = None
    event: DriverEvent | None = None


STREAM_BEGINS: Final = HardwareReply("the stream begins")


# The client: one connection per request.


@asynccontextmanager
async def answering(
    socket_path: Path, request: HardwareRequest
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer to a request, for `next_reply`. Closing it ends it from outside.

    Raises DriverMissing: no process serves the socket; DriverError: it does not answer as simulated
    hardware.
    """
    async with aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(socket_path)),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=REPLY_LIMIT,
    ) as session:
        try:
            async with session.post("http://gpus/", data=msgspec.json.encode(request)) as answer:
                yield answer
        except aiohttp.ClientConnectorError as error:
            raise DriverMissing(
                f"no simulated hardware answers at {socket_path} ({error.strerror or error}); "
                "is an agent with --simulate running?"
            ) from error
        except (aiohttp.ClientError, ValueError, msgspec.MsgspecError) as error:
            text = f"simulated hardware at {socket_path} gives no answer: {cap(str(error))}"
            raise DriverError(text) from error


async def next_reply(answer: aiohttp.ClientResponse) -> HardwareReply:
    """The next reply of an answer, inside the block of `answering`."""
    return msgspec.json.decode(await answer.content.readline(), type=HardwareReply)


async def ask(socket_path: Path, request: HardwareRequest) -> HardwareReply:
    """The reply to `request`. The caller sets the deadline. Raises DriverError, DriverMissing."""
    async with answering(socket_path, request) as answer:
        return await next_reply(answer)
