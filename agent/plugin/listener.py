"""grpclib's server on one socket, which also closes connections of abusive or lingering peers."""

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Callable
from typing import TypeAlias, cast

import msgspec
import structlog
from grpclib.protocol import H2Protocol
from grpclib.server import Server
from h2.events import (
    Event,
    PingAckReceived,
    PingReceived,
    PriorityUpdated,
    RemoteSettingsChanged,
    SettingsAcknowledged,
    StreamReset,
    WindowUpdated,
)
from typing_extensions import override

from agent.kit.cell import Cell
from agent.kit.peer import peer_uid
from agent.kit.throttle import Throttle
from agent.plugin.handlers import DevicePlugin
from agent.plugin.messages import StrictCodec

log = structlog.get_logger(__name__)

PEER_DEADLINE = 0.5
"""Seconds that peers have to close their connections after their last call ended."""

CLOSE_DEADLINE = 1.0
"""Seconds for the remaining handlers to end after that."""

RESETS = 100
"""Calls that a peer may cancel in PERIOD. The kubelet cancels none."""

ASIDES = 3000
"""Frames in PERIOD that belong to no call. The kubelet sends two or three (PING, WINDOW_UPDATE) for
each 16 KiB of a list: 2,200 when 16 GPUs of 1,000 slices fail one by one in that time."""

PERIOD = 10.0
"""Seconds."""

Process: TypeAlias = Callable[[Event], None]

KINDS_OF_ASIDES: tuple[type[Event], ...] = (
    *(PingReceived, PingAckReceived, RemoteSettingsChanged, SettingsAcknowledged),
    *(PriorityUpdated, WindowUpdated),
)

SLICE = 8 * 1024
"""Bytes parsed at a time: a call needs only 20 bytes, and costs 7 KiB even if it is cancelled."""

TELL_PERIOD = 60.0
"""Seconds between two log lines of one kind: callers could cause a flood."""

FORGET_DELAY = 0.1
"""Seconds after the end of a connection in which its calls end."""


class PeerConnections:
    """The connections of one listener, and its log lines. `forget` is called after each ends."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self.open: Cell[frozenset[Peer]] = Cell(frozenset())
        self.forget = forget
        self._throttles: dict[str, Throttle] = {}

    def tell(self, event: str, **fields: float | None) -> None:
        """Log at most one line of that event every 60 s, with how many were left out."""
        left_out = self._throttles.setdefault(event, Throttle(TELL_PERIOD)).admit()
        if left_out is not None:
            log.warning(event, **fields, more=left_out)


class RateBound(msgspec.Struct):
    """Allows `most` of something in PERIOD."""

    most: int
    seen: int = 0
    since: float = 0.0

    def is_over(self, now: float) -> bool:
        """Count one more; True when that is too many."""
        if now - self.since > PERIOD:
            self.seen, self.since = 0, now
        self.seen += 1
        return self.seen > self.most


class Peer(H2Protocol):
    """One connection. It is counted in `peers` and can be closed at once by cut().

    Only root (the kubelet) and the agent's user (its self-check) may connect. The socket's mode
    keeps others out; if one connects, the connection is closed before any byte is read or sent.

    Two more kinds of peers are cut. One begins calls and cancels them: the library keeps each until
    the connection ends, and for a while after. One sends frames without a call: each frame takes
    time, and HTTP/2's automatic answers queue without a bound.
    """

    def __init__(self, plain: H2Protocol, peers: PeerConnections) -> None:
        super().__init__(plain.handler, plain.config, plain.h2_config)
        self._peers = peers
        self._transport: asyncio.Transport | None = None
        self._resets = RateBound(RESETS)
        self._asides = RateBound(ASIDES)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        uid = peer_uid(transport)
        if uid not in {0, os.geteuid()}:
            self._peers.tell("plugin.peer_refused", uid=uid)
            transport.close()
            return
        super().connection_made(transport)
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            self._peers.open.set(self._peers.open.value | {self})
            self.processor.processors[StreamReset] = self._was_reset
            processors = cast("dict[type[Event], Process]", self.processor.processors)
            for kind in KINDS_OF_ASIDES:
                processors[kind] = functools.partial(self._was_aside, processors[kind])

    @override
    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE):
            if self._transport is None or self._transport.is_closing():
                return
            super().data_received(data[start : start + SLICE])

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        if self._transport is None:
            self.handler.close()  # of a refused peer
            self._peers.forget()
            return
        super().connection_lost(exc)
        self._peers.open.set(self._peers.open.value - {self})
        asyncio.get_running_loop().call_later(FORGET_DELAY, self._forget)

    def _forget(self) -> None:
        """Drop the calls that were cancelled before they began; the others have ended by now."""
        self.processor.streams.clear()
        self._peers.forget()

    def _was_reset(self, event: StreamReset) -> None:
        """Count a call that was cancelled, or ended by a violation of HTTP/2."""
        self.processor.process_stream_reset(event)
        if self._resets.is_over(asyncio.get_running_loop().time()):
            self._peers.tell("plugin.peer_resets", resets=RESETS, within=PERIOD)
            self._hang_up()

    def _was_aside(self, process: Process, event: Event) -> None:
        """Count a frame that belongs to no call."""
        process(event)
        if self._asides.is_over(asyncio.get_running_loop().time()):
            self._peers.tell("plugin.peer_calls_nothing", frames=ASIDES, within=PERIOD)
            self._hang_up()

    def _hang_up(self) -> None:
        """Cut the connection; received bytes are not processed further."""
        del self.processor.processors
        self.cut()

    def cut(self) -> None:
        """Close the connection now and drop unsent bytes."""
        if self._transport is not None:
            self._transport.abort()


class Listener(Server):
    """Serves one DevicePlugin. Create it on the loop on which it serves."""

    def __init__(self, handlers: DevicePlugin) -> None:
        super().__init__([handlers], codec=StrictCodec())
        # grpclib itself collects only with every tenth connection.
        self._peers = PeerConnections(self.__gc_collect__)

    @override
    def _protocol_factory(self) -> H2Protocol:
        return Peer(super()._protocol_factory(), self._peers)

    async def serve(self, sock: socket.socket) -> None:
        """Listen on a bound unix socket."""
        # Not by path: asyncio would unlink an existing file, and on 3.13 delete it at the end.
        await self.start(sock=sock)

    async def stop(self) -> None:
        """Accept no more connections, wait 0.5 s for the peers to leave, cut the others.

        Call it after every handler has ended: close() cancels handlers, which then send no answer.
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
        # From 3.12 on, wait_closed also waits for connections; all are closed by now.
        try:
            async with asyncio.timeout(CLOSE_DEADLINE):
                await self.wait_closed()
        except TimeoutError:
            log.warning("plugin.close_overdue", deadline=CLOSE_DEADLINE)
