"""A gRPC server on a unix socket that ends like a killed process: it leaves its socket file."""

import asyncio
import socket
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from grpclib.protocol import H2Protocol
from grpclib.server import Server
from typing_extensions import override

if TYPE_CHECKING:
    from grpclib._typing import IServable

_DEATH_TIMEOUT: Final = 2.0
_TURNS: Final = 3
"""Turns of the loop until a connection that was just accepted can be closed."""


class SocketServer(Server):
    """One incarnation of one socket; built and used inside one event loop."""

    def __init__(self, services: "Collection[IServable]") -> None:
        super().__init__(services)
        self._connections: list[H2Protocol] = []
        self._has_served = False

    @override
    def _protocol_factory(self) -> H2Protocol:
        self._connections = [c for c in self._connections if not _is_closed(c)]
        connection = super()._protocol_factory()
        self._connections.append(connection)
        return connection

    async def serve(self, path: Path) -> None:
        """Bind and listen. An existing file is replaced.

        asyncio gets a bound socket, so that no version of it removes the file at the end.

        Raises:
            OSError: the path cannot be bound.
        """
        listener = _bind(path)
        try:
            await self.start(sock=listener)
            self._has_served = True
        except BaseException:
            listener.close()
            raise

    def open_connections(self) -> int:
        """The number of open connections."""
        return sum(not _is_closed(connection) for connection in self._connections)

    async def die(self) -> None:
        """Cut all connections and stop listening; the socket file stays.

        If it never served, this does nothing.
        """
        if not self._has_served:
            return
        self.close()
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        for connection in self._connections:
            if hasattr(connection, "processor"):
                connection.processor.close("kubelet is gone")
        async with asyncio.timeout(_DEATH_TIMEOUT):
            await self.wait_closed()


def _bind(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    return listener


def _is_closed(connection: H2Protocol) -> bool:
    return hasattr(connection, "connection") and connection.connection.is_closing()
