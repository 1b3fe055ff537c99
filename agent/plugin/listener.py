"""grpclib's server on one socket, which can also hang up on peers that do not leave."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

import structlog
from grpclib.protocol import H2Protocol
from grpclib.server import Server
from h2.events import StreamReset
from typing_extensions import override

from agent.kit.cell import Cell
from agent.kit.peer import peer_uid
from agent.kit.throttle import Throttle
from agent.plugin.handlers import DevicePlugin
from agent.plugin.messages import StrictCodec

log = structlog.get_logger(__name__)

PEER_DEADLINE = 0.5
"""Seconds that peers have to close their connections once all their calls are over."""

CLOSE_DEADLINE = 1.0
"""Seconds for the handlers that are still to be unwound after that."""


RESETS = 100
"""Calls that a peer may take back in RESET_PERIOD. The kubelet takes none back."""

RESET_PERIOD = 10.0
"""Seconds."""

SLICE = 8 * 1024
"""Bytes that are looked at in one go: a call fits into 20, and costs 7 KiB, taken back or not."""

UNREAD = 4 * 1024 * 1024
"""Bytes of answers that a peer may leave unread while it sends: lists wait for their peer by
themselves, but what HTTP/2 has acknowledged, such as a PING, does not."""

TELL_PERIOD = 60.0
"""Seconds between two log lines of one kind: what callers cause can be a flood."""


FORGET_DELAY = 0.1
"""Seconds after the end of a connection, in which its calls are unwound."""


class Peers:
    """The connections of one listener, and what is told of them. `forget` follows their ends."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self.open: Cell[frozenset[Peer]] = Cell(frozenset())
        self.forget = forget
        self._told: dict[str, Throttle] = {}

    def tell(self, event: str, **said: float | None) -> None:
        """One line of that kind a minute, with how many were left out."""
        left_out = self._told.setdefault(event, Throttle(TELL_PERIOD)).admit()
        if left_out is not None:
            log.warning(event, **said, more=left_out)


class Peer(H2Protocol):
    """One connection: it is counted among `peers`, and it can be cut.

    The kubelet is root, and the server checks itself. Anybody else is hung up on before a byte of
    his is read; the socket's mode keeps him out already. So is who begins calls only to take them
    back: the library remembers each until the connection is over, and for a while after.
    """

    def __init__(self, plain: H2Protocol, peers: Peers) -> None:
        super().__init__(plain.handler, plain.config, plain.h2_config)
        self._peers = peers
        self._transport: asyncio.Transport | None = None
        self._resets = 0
        self._resets_since = 0.0

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            self._peers.open.set(self._peers.open.value | {self})
            self.processor.processors[StreamReset] = self._was_reset
            uid = peer_uid(transport)
            if uid not in {0, os.geteuid()}:
                self._peers.tell("plugin.peer_refused", uid=uid)
                self.cut()

    @override
    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE):
            if self._transport is None or self._transport.is_closing():
                return
            if self._transport.get_write_buffer_size() > UNREAD:
                self._peers.tell("plugin.peer_reads_nothing", unread=UNREAD)
                self.cut()
                return
            super().data_received(data[start : start + SLICE])

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._peers.open.set(self._peers.open.value - {self})
        asyncio.get_running_loop().call_later(FORGET_DELAY, self._forget)

    def _forget(self) -> None:
        """Let go of calls that were taken back before they began; those that began let go first."""
        self.processor.streams.clear()
        self._peers.forget()

    def _was_reset(self, event: StreamReset) -> None:
        """A call was taken back, or ended for what is no HTTP/2 in it."""
        self.processor.process_stream_reset(event)
        now = asyncio.get_running_loop().time()
        if now - self._resets_since > RESET_PERIOD:
            self._resets, self._resets_since = 0, now
        self._resets += 1
        if self._resets > RESETS:
            self._peers.tell("plugin.peer_resets", resets=RESETS, within=RESET_PERIOD)
            del self.processor.processors  # what came besides is not looked at
            self.cut()

    def cut(self) -> None:
        """Close the connection now; what is still to be sent is dropped."""
        if self._transport is not None:
            self._transport.abort()


class Listener(Server):
    """Serves one DevicePlugin. Made inside the loop that it serves on."""

    def __init__(self, handlers: DevicePlugin) -> None:
        super().__init__([handlers], codec=StrictCodec())
        self._peers = Peers(self.__gc_collect__)  # else it does so with every tenth connection

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
                    await self._peers.open.until(lambda peers: not peers)
        finally:
            for peer in self._peers.open.value:
                peer.cut()
        # From 3.12 on, wait_closed waits for the connections too: they are all closed by now.
        try:
            async with asyncio.timeout(CLOSE_DEADLINE):
                await self.wait_closed()
        except TimeoutError:
            log.warning("plugin.close_overdue", deadline=CLOSE_DEADLINE)
