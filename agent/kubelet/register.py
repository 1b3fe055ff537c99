"""The kubelet's device plugin directory: which kubelet is there, and the registration with it."""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import structlog
from asyncinotify import Inotify, Mask
from grpclib import GRPCError
from grpclib.exceptions import ProtocolError, StreamTerminatedError

from agent.cluster import NodeEvent
from agent.errors import AgentError, KubeletError, RegistrationRefused, cap
from agent.kit.cell import Cell, News
from agent.kit.tasks import Backoff, in_own_task
from agent.kit.timing import Tally, await_event, loop_time, until_tick
from agent.kubelet.door import PluginServer, listens
from agent.ledger import KubeletEpoch
from agent.wire.v1beta1 import DevicePluginOptions, RegisterRequest, RegistrationStub
from agent.witness import UnixChannel

log = structlog.get_logger(__name__)

# The kubelet's directory, with its sockets. It is on the node's disk, and an Allocate needs its
# state at once: the loop inspects it.

POLL = 5.0
"""Seconds after which the directory is watched anew: inotify may have missed something."""

AGAIN = 0.2
"""The same while inotify cannot watch it."""

ENDS = Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT | Mask.IGNORED | Mask.Q_OVERFLOW
"""After these, the directory at this path may be another one, or events are missing."""

WATCHED = Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO | ENDS | Mask.ONLYDIR


class KubeletDirectory:
    """Watches `directory`, where the kubelet's own socket has the name `kubelet`.

    Sole writer of `epoch`: the present kubelet instance; None: there is none. Each of `listeners`
    is called with the name of each file that was created or removed; empty: any file.
    """

    def __init__(self, directory: Path, kubelet: str = "kubelet.sock") -> None:
        self._directory = directory
        self.kubelet = kubelet
        self.epoch: Cell[KubeletEpoch | None] = Cell(None)
        self.listeners: list[Callable[[str], None]] = []

    async def run(self) -> None:
        """Follow the directory for ever."""
        async with contextlib.aclosing(self.changes()) as names:
            async for name in names:
                for hear in self.listeners:
                    hear(name)
                self.epoch.set(self.read(self.kubelet))

    def now(self) -> KubeletEpoch | None:
        """The kubelet instance, read from its socket at this moment."""
        return self.read(self.kubelet)

    def read(self, name: str) -> KubeletEpoch | None:
        """The file `name` as it is now; None: it is not there."""
        try:
            status = (self._directory / name).stat()
        except OSError:
            return None
        return KubeletEpoch(inode=status.st_ino, ctime_ns=status.st_ctime_ns)

    async def changes(self) -> AsyncGenerator[str, None]:
        """Yield names that were created, removed or replaced, for ever; empty: any may have been.

        The empty name comes first, and every POLL seconds, or AGAIN while nothing can be watched.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        with contextlib.ExitStack() as stack:
            # Kept for good: a user has 128 of them, and others may have taken the last one.
            inotify: Inotify | None = None
            while True:
                try:
                    if inotify is None:
                        inotify = stack.enter_context(Inotify(sync_timeout=0))
                        loop.add_reader(inotify.fd, news.set)
                        stack.callback(loop.remove_reader, inotify.fd)
                    inotify.add_watch(self._directory, WATCHED)
                    due = loop.time() + until_tick(POLL)
                except OSError:
                    due = loop.time() + AGAIN
                yield ""

                is_over = False
                while not is_over and loop.time() < due:
                    await await_event(news, due - loop.time())
                    news.clear()
                    # Not Inotify.get(): it loses events when its caller is cancelled.
                    events = list(iter(inotify.sync_get, None)) if inotify else []
                    for name in dict.fromkeys(str(event.name) for event in events if event.name):
                        yield name
                    is_over = any(event.mask & ENDS for event in events)


# Keeps the resource registered with the kubelet: an open list stream proves the registration.

API_VERSION = "v1beta1"

DELAYS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
JITTER = 0.5

REGISTER_DEADLINE = 15.0
"""Seconds: during the call the kubelet connects to the plugin, for which it allows 10 s."""

STREAM_DEADLINE = 5.0
"""Seconds from an accepted Register to the stream."""

REBIND_DEADLINE = 15.0
STABLE_AFTER = 10.0
"""Seconds that a stream must last before the delays start over."""

FRESH_FOR = 1.0
"""Seconds in which a new kubelet socket that refuses connections is tried every 10 to 50 ms."""

LOOK_AGAIN = 5.0
"""Seconds between checks of the directory while no change is reported: a plugin that is killed
leaves its socket file."""

SWEEP_LOOK = 0.5
"""Seconds between checks for the agent's socket file during a Register."""


async def register_plugin(kubelet: Path, endpoint: str, resource: str, *, fenced: bool) -> None:
    """Register the socket named `endpoint` at the kubelet's socket. The caller sets the deadline.

    Raises RegistrationRefused, with the kubelet's text; KubeletError: it is not there, or the
    connection broke.
    """
    options = DevicePluginOptions(
        pre_start_required=fenced, get_preferred_allocation_available=True
    )
    request = RegisterRequest(API_VERSION, endpoint, resource, options)
    try:
        async with UnixChannel(path=str(kubelet)) as channel:
            await in_own_task(RegistrationStub(channel).register(request))
    except GRPCError as error:
        raise RegistrationRefused(cap(error.message or error.status.name)) from error
    except (OSError, StreamTerminatedError, ProtocolError) as error:
        reason = cap(getattr(error, "strerror", None) or str(error))
        raise KubeletError(f"the connection to {kubelet} broke: {reason}") from error


class RegistrationState(msgspec.Struct, frozen=True):
    """The state for readiness and for people."""

    registered: bool = False
    text: str = "not registered yet"


class Registration:
    """Registers the present name of `resource` by `register`, see register_plugin().

    The kubelet never dials again by itself. A second Register beside an open stream costs, up to
    and including 1.36, the registration. So the agent registers only while no stream is open. It
    registers again when the stream ends and when its socket file is gone (every kubelet removes all
    sockets at its start). The stream does not show that another plugin registered: renew().
    """

    def __init__(
        self,
        resource: Cell[str],
        serving: PluginServer,
        directory: KubeletDirectory,
        register: Callable[[str, str], Awaitable[None]],
        chance: random.Random,
    ) -> None:
        self._resource = resource
        self._serving, self._streams = serving, serving.streams
        self._directory = directory
        self._send = register
        self._chance = chance
        self._backoff = Backoff(DELAYS, JITTER, chance)
        self._changes: Cell[int] = Cell(0)
        self._kubelet: KubeletEpoch | None = None
        self._spent = ""
        """The endpoint that the kubelet must not be given again."""
        self._due = self._fresh_until = 0.0
        """Loop times: of the next attempt, and until when a new kubelet is tried quickly."""
        self.state: Cell[RegistrationState] = Cell(RegistrationState())
        self.registrations = Tally(
            "registrations_total", "Register calls that the kubelet accepted."
        )

    @property
    def registration_id(self) -> int | None:
        """The registration that the kubelet uses; None: no stream is open."""
        return self._streams.version if self._streams.value > 0 else None

    def renew(self) -> None:
        """Serve on a new socket and register it, if a stream is open: else that is under way."""
        if self._streams.value > 0:
            self._spent = self._serving.endpoint
            self._changes.set(self._changes.value + 1)

    def heard(self, name: str) -> None:
        """Note that a file was created or removed in the kubelet's directory; empty: any."""
        if name in {"", self._directory.kubelet, self._serving.endpoint}:
            self._changes.set(self._changes.value + 1)

    async def run(self) -> NoReturn:
        """Keep the resource registered for ever."""
        while True:
            kubelet = self._directory.read(self._directory.kubelet)
            if kubelet is not None and kubelet != self._kubelet:
                # It starts over, without the delays of the former kubelet instance.
                self._kubelet = kubelet
                self._due, self._fresh_until = loop_time(), loop_time() + FRESH_FOR
                self._backoff.reset()

            # Kubelets up to and including 1.36 end it at another Register beside an open stream.
            if self._is_bound() and self._streams.value > 0:
                await self._serve()
            elif kubelet is None:
                text = "waiting for the kubelet: its socket is not there"
                self._publish("registration.waiting", text)
                await self._wait(until_tick(LOOK_AGAIN))
            elif self._due - loop_time() >= 0.001:  # less is what a clock may not resolve
                await self._wait(self._due - loop_time())
            elif self._is_bound():
                await self._register()
            else:
                try:
                    async with asyncio.timeout(REBIND_DEADLINE):
                        await self._serving.rebind()
                except (AgentError, TimeoutError) as error:
                    self._retry("registration.not_serving", f"no socket serves: {_text(error)}")

    def _is_bound(self) -> bool:
        """Whether a server of the present name has its socket file where the kubelet dials it."""
        endpoint = self._serving.endpoint
        is_usable = endpoint != self._spent and self._serving.served == self._resource.value
        return is_usable and bool(endpoint) and self._directory.read(endpoint) is not None

    async def _register(self) -> None:
        """Send one Register and wait for its stream, unless that has come and gone already.

        The call is cancelled if the agent's socket file goes, as at a kubelet's start: it would
        dial the removed socket for 10 s and fail every admission meanwhile.
        """
        endpoint, before = self._serving.endpoint, self._streams.version

        async def until_gone() -> None:
            while self._directory.read(endpoint) is not None:
                await self._wait(SWEEP_LOOK)
            raise KubeletError("the kubelet removed the agent's socket file during the call")

        error: Exception | None = None
        try:
            async with asyncio.timeout(REGISTER_DEADLINE), asyncio.TaskGroup() as group:
                gone = group.create_task(until_gone())
                await self._send(endpoint, self._resource.value)
                gone.cancel()
        except* (AgentError, TimeoutError) as failed:
            error = failed.exceptions[0]

        if error is None:
            self.registrations.add()
            due = loop_time() + STREAM_DEADLINE
            while (
                self._streams.version == before
                and self._is_bound()
                and self._directory.read(self._directory.kubelet) == self._kubelet
                and due - loop_time() >= 0.001
            ):
                text = "registered, waiting for the kubelet's stream"
                self._publish("registration.accepted", text, registered=True)
                await self._wait(due - loop_time())
            if self._streams.value == 0:
                text = "registered, but the kubelet has no stream open"
                self._retry("registration.no_stream", text)

        elif self._streams.value == 0:  # an open stream proves a registration despite the error
            delay = None
            if isinstance(error, RegistrationRefused):
                # The kubelet's record of this name may stay wrong for ever; a new name has none.
                self._spent = endpoint
            elif loop_time() < self._fresh_until:
                # A kubelet that starts has its socket some milliseconds before it takes calls.
                delay = 0.01 + 0.04 * self._chance.random()
            text = f"registration with the kubelet failed: {_text(error)}"
            self._retry("registration.failed", text, delay)

    async def _serve(self) -> None:
        """Wait until the stream or the socket is lost.

        A new kubelet socket alone is no reason: a kubelet that starts removes the agent's socket.
        """
        since = loop_time()
        text = "registered, the kubelet takes the lists"
        self._publish("registration.serving", text, registered=True)
        while self._is_bound() and self._streams.value > 0:
            await self._wait(until_tick(LOOK_AGAIN))

        if loop_time() - since >= STABLE_AFTER:
            self._backoff.reset()
        lost = "the kubelet's stream ended" if self._is_bound() else "it needs a new socket"
        self._retry("registration.lost", f"{lost}, registering again")

    def _retry(self, event: str, text: str, delay: float | None = None) -> None:
        """Publish why no registration stands, and try again after `delay` or the back-off's."""
        self._due = loop_time() + (self._backoff.next() if delay is None else delay)
        self._publish(event, text, problem=True)

    def _publish(
        self, event: str, text: str, *, registered: bool = False, problem: bool = False
    ) -> None:
        if self.state.set(RegistrationState(registered, text)):
            tell = log.warning if problem else log.info
            tell(event, resource=self._resource.value, endpoint=self._serving.endpoint, text=text)

    async def _wait(self, seconds: float) -> None:
        """Wait for a change, so long at most. What came before the call was looked at."""
        await News(self._changes, self._resource, self._streams).wait(seconds)


def _text(error: Exception) -> str:
    return cap(str(error)) or f"no answer within {REGISTER_DEADLINE:g} s"


# Watches for another device plugin of the agent's resource, and registers again when it is gone.

NVIDIA = "nvidia.com"

SETTLE = 0.5
"""Seconds from a change of its socket file to the check: a plugin binds before it listens."""


class Rivals:
    """Watches the socket of HAMi's or NVIDIA's plugin for a resource; both give it the same name.

    The name omits the resource's domain, so it counts only for NVIDIA's own.
    Source: nvinternal/plugin/server.go of both, NewNvidiaDevicePlugin.

    Up to and including 1.36, the kubelet uses the plugin that registered last, and tells neither.
    When that one ends, the kubelet stops the resource although the agent's stream is open. So the
    agent registers again when the other socket is gone and its own stream did not end.
    """

    def __init__(
        self,
        directory: Path,
        resource: Cell[str],
        registration: Registration,
        say: Callable[[NodeEvent], None],
    ) -> None:
        self._directory = directory
        self._resource = resource
        self._registration = registration
        self._say = say
        self._news = asyncio.Event()

    @property
    def name(self) -> str:
        """The socket's base name; empty if none identifies the resource."""
        domain, _, tail = self._resource.value.partition("/")
        return f"nvidia-{tail}.sock" if domain == NVIDIA else ""

    @property
    def path(self) -> str:
        """The socket's path."""
        return str(self._directory / self.name)

    def answers(self) -> bool | None:
        """Whether a process listens on the socket; None: there is no such socket."""
        return listens(self._directory / self.name) if self.name else None

    def heard(self, name: str) -> None:
        """Note that a file was created or removed in the socket's directory."""
        if name and name == self.name:
            self._news.set()

    async def run(self) -> NoReturn:
        """Watch the socket for ever."""
        self._news.clear()
        now, registered = self.answers(), self._registration.registration_id
        while True:
            came = await await_event(self._news, until_tick(LOOK_AGAIN))
            await asyncio.sleep(SETTLE if came else 0.0)
            self._news.clear()
            before, now = now, self.answers()
            # A rival may come and go between two checks. The removal of a dead file does not count.
            was_here = before or (came and before is None)
            is_same = registered is not None and registered == self._registration.registration_id
            if now and not before:
                resource, path = self._resource.value, self.path
                log.warning("registration.rival", resource=resource, path=path)
                text = (
                    f"Another device plugin serves {resource} at {path}: the kubelet may ask it."
                    " Remove it (HAMi's is the DaemonSet hami-device-plugin)."
                )
                self._say(NodeEvent("PluginConflict", text, warning=True))
            elif not now and was_here and is_same:
                log.info("registration.rival_gone", resource=self._resource.value)
                self._registration.renew()
            registered = self._registration.registration_id
