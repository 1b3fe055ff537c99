"""grpclib's server on one socket, which can also hang up on peers that do not leave."""

import asyncio
import contextlib
import os
import socket

import structlog
from grpclib.protocol import H2Protocol
from grpclib.server import Server
from typing_extensions import override

from agent.kit.cell import Cell
from agent.kit.peer import peer_uid
from agent.plugin.handlers import DevicePlugin
from agent.plugin.messages import StrictCodec

log = structlog.get_logger(__name__)

PEER_DEADLINE = 0.5
"""Seconds that peers have to close their connections once all their calls are over."""

CLOSE_DEADLINE = 1.0
"""Seconds for the handlers that are still to be unwound after that."""


class Peer(H2Protocol):
    """One connection: it is counted among `peers`, and it can be cut.

    The kubelet is root, and the server checks itself. Anybody else is hung up on before a byte of
    his is read; the socket's mode keeps him out already.
    """

    def __init__(self, plain: H2Protocol, peers: "Cell[frozenset[Peer]]") -> None:
        super().__init__(plain.handler, plain.config, plain.h2_config)
        self._peers = peers
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            self._peers.set(self._peers.value | {self})
            uid = peer_uid(transport)
            if uid not in {0, os.geteuid()}:
                log.warning("plugin.peer_refused", uid=uid)
                self.cut()

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._peers.set(self._peers.value - {self})

    def cut(self) -> None:
        """Close the connection now; what is still to be sent is dropped."""
        if self._transport is not None:
            self._transport.abort()


class Listener(Server):
    """Serves one DevicePlugin. Made inside the loop that it serves on."""

    def __init__(self, handlers: DevicePlugin) -> None:
        super().__init__([handlers], codec=StrictCodec())
        self._peers: Cell[frozenset[Peer]] = Cell(frozenset())

    @override
    def _protocol_factory(self) -> H2Protocol:
        return Peer(super()._protocol_factory(), self._peers)

    async def serve(self, sock: socket.socket) -> None:
        """Listen on a bound unix socket."""
        # Not by path: asyncio would unlink what lies there, and on 3.13 delete it afterwards.
        await self.start(sock=sock)

    async def stop(self) -> None:
        """Take no more connections, wait for the peers to leave, cut those that stay.

        Every handler must be over: close() cancels what runs, and a cancelled call sends nothing.
        """
        if self._server is None:
            return
        self.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PEER_DEADLINE):
                    await self._peers.until(lambda peers: not peers)
        finally:
            for peer in self._peers.value:
                peer.cut()
        # From 3.12 on, wait_closed waits for the connections too: they are all closed by now.
        try:
            async with asyncio.timeout(CLOSE_DEADLINE):
                await self.wait_closed()
        except TimeoutError:
            log.warning("plugin.close_overdue", deadline=CLOSE_DEADLINE)
