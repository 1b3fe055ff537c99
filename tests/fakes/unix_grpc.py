"""A gRPC server of scripted handlers on a unix socket, which ends as a process does."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from agent.sandbox.kubelet.serving import SocketServer


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
