"""A gRPC server of scripted handlers on a unix socket, which ends as a process does."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from agent.sandbox.kubelet.services import SocketServer


@contextlib.asynccontextmanager
async def served(path: Path, *handlers: Any) -> AsyncIterator[None]:
    """`handlers` answer at `path` until the block is left; then connections break, as in a crash.

    The socket file stays behind, dead.
    """
    server = SocketServer(handlers)
    await server.serve(path)
    try:
        yield
    finally:
        await server.die()


async def dialled_in_vain(path: Path, ask: Coroutine[Any, Any, object]) -> object:
    """What `ask` raises where the process at `path` takes its connection and ends at once.

    It ends before the first byte: the connection is lost as soon as it is made.
    """
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    async def asked() -> object:
        try:
            return await ask
        except Exception as error:  # noqa: BLE001 -- which one it is, is the question
            return error

    async with asyncio.TaskGroup() as group:
        outcome = group.create_task(asked())
        asyncio.get_running_loop().call_soon(listening.close)
    return outcome.result()
