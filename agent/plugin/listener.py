"""grpclib's server on one socket, which can also hang up on peers that do not leave."""

import asyncio
import contextlib
import dataclasses
import functools
import os
import socket
from collections.abc import Callable
from typing import TypeAlias, cast

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
"""Seconds that peers have to close their connections once all their calls are over."""

CLOSE_DEADLINE = 1.0
"""Seconds for the handlers that are still to be unwound after that."""


RESETS = 100
"""Calls that a peer may take back in PERIOD. The kubelet takes none back."""

ASIDES = 3000
"""Frames in PERIOD that are part of no call. The kubelet sends two or three for each 16 KiB of our
lists: a PING and windows. 16 GPUs of 1,000 slices that fail one by one in that time are 2,200."""

PERIOD = 10.0
"""Seconds."""

Process: TypeAlias = Callable[[Event], None]

KINDS_OF_ASIDES: tuple[type[Event], ...] = (
    *(PingReceived, PingAckReceived, RemoteSettingsChanged, SettingsAcknowledged),
    *(PriorityUpdated, WindowUpdated),
)

SLICE = 8 * 1024
"""Bytes that are looked at in one go: a call fits into 20, and costs 7 KiB, taken back or not."""

TELL_PERIOD = 60.0
"""Seconds between two log lines of one kind: what callers cause can be a flood."""


FORGET_DELAY = 0.1
"""Seconds after the end of a connection, in which its calls are unwound."""


class PeerConnections:
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


@dataclasses.dataclass(slots=True)
class RateBound:
    """So many of something, `most`, in PERIOD."""

    most: int
    seen: int = 0
    since: float = 0.0

    def is_over(self, now: float) -> bool:
        """There was one more: whether that is too many."""
        if now - self.since > PERIOD:
            self.seen, self.since = 0, now
        self.seen += 1
        return self.seen > self.most


class Peer(H2Protocol):
    """One connection: it is counted among `peers`, and it can be cut.

    The kubelet is root, and the server checks itself. Anybody else is hung up on before a byte of
    his is read and before he is told one; the socket's mode keeps him out already. Who begins calls
    only to take them back is hung up on, too: the library remembers each until the connection is
    over, and for a while after. So is who talks on without a call: each frame takes time from the
    others, and what HTTP/2 answers by itself waits for no reader.
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
            self.handler.close()  # a stranger's
            self._peers.forget()
            return
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
        if self._resets.is_over(asyncio.get_running_loop().time()):
            self._peers.tell("plugin.peer_resets", resets=RESETS, within=PERIOD)
            self._hang_up()

    def _was_aside(self, process: Process, event: Event) -> None:
        """A frame came that is part of no call."""
        process(event)
        if self._asides.is_over(asyncio.get_running_loop().time()):
            self._peers.tell("plugin.peer_calls_nothing", frames=ASIDES, within=PERIOD)
            self._hang_up()

    def _hang_up(self) -> None:
        """Cut the connection; what came besides is not looked at."""
        del self.processor.processors
        self.cut()

    def cut(self) -> None:
        """Close the connection now; what is still to be sent is dropped."""
        if self._transport is not None:
            self._transport.abort()


class Listener(Server):
    """Serves one DevicePlugin. Made inside the loop that it serves on."""

    def __init__(self, handlers: DevicePlugin) -> None:
        super().__init__([handlers], codec=StrictCodec())
        self._peers = PeerConnections(
            self.__gc_collect__
        )  # else it does so with every tenth connection

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
