"""The device plugin server of one resource: it binds, serves, checks itself, drains and unlinks.

The kubelet deletes every socket when it starts. Then the watcher of the directory calls rebind(),
which starts a new server on a new socket.
"""

import asyncio
import contextlib
import random
from pathlib import Path

import structlog
from grpclib import GRPCError
from grpclib.exceptions import StreamTerminatedError

from agent.core.errors import KubeletError
from agent.core.inventory.slices import SliceList
from agent.kit.cell import Cell
from agent.kit.dial import UnixChannel
from agent.kit.running_time import Lag
from agent.plugin.handlers import DevicePlugin, Fence, SliceAllocator
from agent.plugin.listener import Listener
from agent.plugin.sockets import BoundSocket, bind, sweep
from agent.plugin.traffic import Traffic
from agent.wire.v1beta1 import DevicePluginStub, Empty

log = structlog.get_logger(__name__)

LAST_CALLS = 1.0
"""Seconds in which admissions in progress are served to their end."""

DRAIN_DEADLINE = 10.0
"""Seconds that open calls have to finish: so long an Allocate waits for the disk or the kubelet."""

STREAM_DEADLINE = 1.0
"""Seconds for the list streams to end; a kubelet that does not read is cut off."""

SELF_CHECK_DEADLINE = 2.0


class Incarnation:
    """One server on one socket, from serve() to stop()."""

    def __init__(self, bound: BoundSocket, lists: Cell[SliceList], plugin: DevicePlugin) -> None:
        self._bound = bound
        self._plugin = plugin
        self._listener = Listener(plugin)
        self.lists = lists

    @property
    def endpoint(self) -> str:
        """The base name of its socket."""
        return self._bound.path.name

    async def serve(self) -> None:
        """Listen, and check by a call that the server answers.

        Raises:
            KubeletError: the call was not answered.
        """
        await self._listener.serve(self._bound.sock)
        try:
            async with (
                Lag().within(SELF_CHECK_DEADLINE),
                UnixChannel(path=str(self._bound.path)) as channel,
            ):
                await DevicePluginStub(channel).get_device_plugin_options(Empty())
        except (OSError, TimeoutError, GRPCError, StreamTerminatedError) as error:
            raise KubeletError(
                f"{self._bound.path} does not answer a call of its own server: {error!r}"
            ) from error

    async def stop(self) -> None:
        """Finish admissions, end the list streams, close, and delete the socket file.

        In that order: the kubelet closes its connection, with all open calls, after the stream.
        """
        try:
            if self._plugin.streams.value > 0:  # without a stream no kubelet is connected
                with contextlib.suppress(TimeoutError):
                    async with Lag().within(LAST_CALLS):
                        await self._plugin.calls.over()
            self._plugin.drain()
            await _zero(self._plugin.calls.open, DRAIN_DEADLINE, "plugin.drain_overdue")
            self.lists.close()
            await _zero(self._plugin.streams, STREAM_DEADLINE, "plugin.stream_overdue")
            await self._listener.stop()
        finally:
            self.lists.close()
            self._bound.unlink()
            self._bound.sock.close()


async def _zero(count: Cell[int], deadline: float, overdue: str) -> None:
    try:
        async with Lag().within(deadline):
            await count.until(lambda open_calls: open_calls == 0)
    except TimeoutError:
        log.warning(overdue, deadline=deadline, left=count.value)


class PluginServer:
    """Serves our resource in the kubelet's directory, on a new socket after each rebind().

    `resource` is its name, which names the next socket. With a `fence` the kubelet asks before each
    start of a container.
    """

    def __init__(
        self,
        directory: Path,
        resource: Cell[str],
        lists: Cell[SliceList],
        allocator: SliceAllocator,
        chance: random.Random,
        fence: Fence | None = None,
    ) -> None:
        self._directory = directory
        self._resource = resource
        self._lists = lists
        self._allocator = allocator
        self._chance = chance
        self._fence = fence
        self._turn = asyncio.Lock()
        self._current: Incarnation | None = None
        self._stopped = False
        self.traffic = Traffic()

    @property
    def endpoint(self) -> str:
        """The base name of the socket that serves now; empty while none does."""
        return "" if self._current is None else self._current.endpoint

    async def run(self) -> None:
        """Allow serving until cancelled; then stop the server."""
        self._stopped = False
        try:
            await asyncio.Event().wait()
        finally:
            self._stopped = True
            # In a task of its own: in one that is being cancelled, Python before 3.11.3 ends each
            # asyncio.timeout by a cancellation, and the calls under way would be cut off.
            await asyncio.shield(self._finish())

    async def _finish(self) -> None:
        async with self._turn:
            await self._retire()

    async def rebind(self) -> None:
        """Stop the present server, if any, and serve on a new socket, which answers on return.

        The old server stops completely first: up to and including kubelet 1.36, the end of an old
        stream removes the newest registration of its resource.

        Raises:
            PermissionFault, SettingsError, KubeletError: the socket cannot be bound, or does not
                answer. Then no server runs.
        """
        await asyncio.shield(self._finish())  # a caller that is cancelled cuts off no open call
        async with self._turn:
            if self._stopped:
                raise KubeletError("the plugin server is stopping")
            await self._retire()  # one that another call has bound meanwhile
            resource = self._resource.value
            for name in sweep(self._directory, resource):
                log.info("plugin.stale_socket_removed", name=name)
            bound = bind(self._directory, resource, self._chance)
            # A cell of its own: closing it ends only the streams of this server.
            lists = self._lists.branch()
            plugin = DevicePlugin(
                lists,
                self._allocator,
                self.traffic,
                self._fence,
                is_current=lambda: self._resource.value == resource,
            )
            server = Incarnation(bound, lists, plugin)
            async with contextlib.AsyncExitStack() as undo:
                undo.push_async_callback(server.stop)
                await server.serve()
                undo.pop_all()
            self._current = server
            log.info("plugin.serving", endpoint=server.endpoint, resource=resource)

    async def _retire(self) -> None:
        server, self._current = self._current, None
        if server is not None:
            await server.stop()
            log.info("plugin.stopped", endpoint=server.endpoint)
