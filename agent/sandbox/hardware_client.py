"""The client of the control socket of simulated hardware: one connection per request."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from agent.core.errors import AgentError, cap
from agent.sandbox import hardware_talk as talk


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
        reader, writer = await asyncio.open_unix_connection(socket_path, limit=talk.REPLY_LIMIT)
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


async def ask(socket_path: Path, request: talk.HardwareRequest) -> talk.AnyReply:
    """The reply to `request`. The caller sets the deadline.

    Raises HardwareUnreachable, HardwareSilent.
    """
    async with connection(socket_path) as (reader, writer):
        writer.write(talk.encode(request))
        return await read_reply(reader, socket_path)


async def read_reply(reader: asyncio.StreamReader, socket_path: Path) -> talk.AnyReply:
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
        return talk.decode_reply(line)
    except msgspec.MsgspecError as error:
        raise HardwareSilent(
            f"the answer at {socket_path} is not one of simulated hardware: {cap(str(error))}"
        ) from error
