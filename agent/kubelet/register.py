"""Registers the plugin at the kubelet, and watches for another plugin."""

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import structlog
from grpclib import GRPCError
from grpclib.exceptions import ProtocolError, StreamTerminatedError

from agent.cluster import NodeEvent
from agent.errors import AgentError, KubeletError, RegistrationRefused, cap
from agent.kit.cell import Cell, News
from agent.kit.tasks import Backoff, in_own_task
from agent.kit.timing import Tally, loop_time, until_tick
from agent.kit.unix import UnixChannel
from agent.kubelet.door import PluginServer, listens
from agent.ledger import KubeletEpoch
from agent.ports import SocketWatch
from agent.wire.v1beta1 import DevicePluginOptions, RegisterRequest, RegistrationStub

API_VERSION = "v1beta1"


class KubeletRegistrar:
    """The Registration service of the kubelet, at its unix socket.

    `fenced`: the kubelet shall call PreStartContainer before each container start.
    """

    def __init__(self, socket: Path, *, fenced: bool = False) -> None:
        self._socket = socket
        self._fenced = fenced

    async def register(self, endpoint: str, resource: str) -> None:
        """Register the socket named `endpoint`, with the options of GetDevicePluginOptions.

        The caller sets the deadline.

        Raises:
            RegistrationRefused: the kubelet refused; the text is the kubelet's.
            KubeletError: the kubelet is not there, or the connection broke.
        """
        request = RegisterRequest(
            version=API_VERSION,
            endpoint=endpoint,
            resource_name=resource,
            options=DevicePluginOptions(
                pre_start_required=self._fenced, get_preferred_allocation_available=True
            ),
        )
        try:
            async with UnixChannel(path=str(self._socket)) as channel:
                await in_own_task(RegistrationStub(channel).register(request))
        except GRPCError as error:
            text = error.message or error.status.name
            raise RegistrationRefused(cap(text)) from error
        except FileNotFoundError as error:
            raise KubeletError(f"{self._socket} is not there: is the kubelet running?") from error
        except ConnectionRefusedError as error:
            raise KubeletError(f"{self._socket} refuses connections: no kubelet listens") from error
        except (OSError, StreamTerminatedError, ProtocolError) as error:
            text = f"the connection to {self._socket} broke: {cap(str(error))}"
            raise KubeletError(text) from error


# Keeps the resource registered with the kubelet: an open list stream proves the registration.

log = structlog.get_logger(__name__)

KUBELET_SOCKET = "kubelet.sock"

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

REFUSED_DELAY = 60.0
"""Seconds until the next Register after a refusal that will not change by itself."""

LOOK_AGAIN = 5.0
"""Seconds between checks of the directory while no change is reported: a plugin that is killed
leaves its socket file."""

SWEEP_LOOK = 0.5
"""Seconds between checks for the agent's socket file during a Register."""

_LOST = {
    "stream_lost": "the kubelet's stream ended",
    "socket_lost": "the agent's socket file is gone",
    "rival_gone": "another plugin took the resource and is gone",
    "renamed": "the resource has another name",
}
_ALREADY = "already connected"
_FOR_GOOD = ("is not supported by kubelet", "is invalid")


class RegistrationState(msgspec.Struct, frozen=True):
    """The state for readiness and for people. `stream`: the kubelet receives the agent's lists."""

    registered: bool = False
    stream: bool = False
    text: str = "not registered yet"


class KubeletWatch:
    """Sole writer of `epoch`: the present kubelet instance; None: there is no kubelet socket.

    Each `heard` is called with the name of each file that was created or removed; empty: any file.
    """

    def __init__(self, watch: SocketWatch, *heard: Callable[[str], None]) -> None:
        self._watch = watch
        self._heard = heard
        self.epoch: Cell[KubeletEpoch | None] = Cell(None)

    async def run(self) -> None:
        """Follow the kubelet's directory for ever. Raises KubeletError when the watch ends."""
        async for name in self._watch.changes():
            for hear in self._heard:
                hear(name)
            self.epoch.set(self._watch.epoch())
        raise KubeletError("the watch of the kubelet's directory ended")

    def now(self) -> KubeletEpoch | None:
        """The kubelet instance, read from its socket at this moment."""
        try:
            return self._watch.epoch()
        except KubeletError:
            return self.epoch.value


class Registration:
    """Registers the present name of `resource`. `streams`: the number of open list streams.

    The kubelet never dials again by itself. A second Register beside an open stream costs a
    connection and, up to and including 1.36, the registration. So the agent registers only while no
    stream is open, and then waits for the stream. It registers again when the stream ends, when its
    socket file is gone (every kubelet removes all sockets at its start), and when the kubelet's
    socket is new. The stream does not show that another plugin registered: `renew` is for that.
    """

    def __init__(
        self,
        resource: Cell[str],
        serving: PluginServer,
        watch: SocketWatch,
        registrar: KubeletRegistrar,
        streams: Cell[int],
        chance: random.Random,
    ) -> None:
        self._resource = resource
        self._serving = serving
        self._watch = watch
        self._registrar = registrar
        self._streams = streams
        self._chance = chance
        self._backoff = Backoff(DELAYS, JITTER, chance)
        self._changes: Cell[int] = Cell(0)
        self._kubelet: KubeletEpoch | None = None
        self._trigger = "start"
        self._served = ""
        """The resource name of the server that was bound last."""
        self._name_is_spent = False
        """The kubelet must not be given that server's socket again."""
        self._registration_id = 0
        """It changes with each accepted Register and each end of the streams."""
        self._due = self._fresh_until = 0.0
        """The loop times of the next attempt, and until when a new kubelet is tried quickly."""
        self.state: Cell[RegistrationState] = Cell(RegistrationState())
        self.registrations = Tally(
            "registrations_total", "Register calls that the kubelet accepted.", ("trigger",)
        )

    async def run(self) -> None:
        """Keep the resource registered for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_streams())
            while True:
                await self._step()

    @property
    def registration_id(self) -> int | None:
        """The registration that the kubelet uses; None: no stream is open."""
        return self._registration_id if self._streams.value > 0 else None

    def renew(self) -> None:
        """Serve on a new socket and register it although a stream is open.

        Does nothing while no stream is open: then a registration is under way.
        """
        if self._streams.value > 0:
            self._trigger, self._name_is_spent = "rival_gone", True
            self._changes.set(self._changes.value + 1)

    def heard(self, name: str) -> None:
        """Take note that a file was created or removed in the kubelet's directory; empty: any."""
        if name in {"", KUBELET_SOCKET, self._serving.endpoint}:
            self._changes.set(self._changes.value + 1)

    async def _follow_streams(self) -> None:
        counts = self._streams.follow()
        await anext(counts)
        async for count in counts:
            if count == 0:  # also of a stream that opened and ended between two steps
                self._registration_id += 1
            self.state.set(msgspec.structs.replace(self.state.value, stream=count > 0))
            self._changes.set(self._changes.value + 1)

    async def _step(self) -> None:
        kubelet = self._watch.epoch()
        if kubelet is not None and kubelet != self._kubelet:
            self._on_new_kubelet(kubelet)

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
            await self._bind()

    def _on_new_kubelet(self, kubelet: KubeletEpoch) -> None:
        """Start over, without the delays of the former kubelet instance."""
        if self._kubelet is not None:
            self._trigger = "kubelet_restart"
        self._kubelet = kubelet
        self._due, self._fresh_until = loop_time(), loop_time() + FRESH_FOR
        self._backoff.reset()

    def _is_bound(self) -> bool:
        """Whether a server of the present name has its socket file where the kubelet dials it."""
        endpoint = self._serving.endpoint
        is_usable = self._served == self._resource.value and not self._name_is_spent
        return is_usable and bool(endpoint) and self._watch.exists(endpoint)

    async def _bind(self) -> None:
        # Both may change again until the new socket serves.
        self._served, self._name_is_spent = self._resource.value, False
        try:
            async with asyncio.timeout(REBIND_DEADLINE):
                await self._serving.rebind()
        except (AgentError, TimeoutError) as error:
            self._retry("registration.not_serving", f"no socket serves: {_text(error)}")

    async def _register(self) -> None:
        before = self._registration_id
        error = await self._call()
        if error is None:
            self.registrations.add(self._trigger)
            self._registration_id += 1
            await self._await_stream(before + 1)
            return

        if self._streams.value > 0:
            return

        is_refused, text = isinstance(error, RegistrationRefused), _text(error)
        # The kubelet's record of this name may stay wrong for ever; a new name has none.
        self._name_is_spent |= is_refused and _ALREADY in text
        delay = None
        if is_refused and any(words in text for words in _FOR_GOOD):
            delay = REFUSED_DELAY
        elif not is_refused and loop_time() < self._fresh_until:
            # A kubelet that starts has its socket some milliseconds before it takes calls.
            delay = 0.01 + 0.04 * self._chance.random()
        self._retry("registration.failed", f"registration with the kubelet failed: {text}", delay)

    async def _call(self) -> Exception | None:
        """Send one Register; cancel it if the agent's socket file goes. Returns the error, or None.

        A kubelet that starts removes all sockets just before it accepts calls. It would dial the
        removed socket for 10 s and fail every admission meanwhile.
        """
        endpoint = self._serving.endpoint

        async def until_gone() -> None:
            while self._watch.exists(endpoint):
                await self._wait(SWEEP_LOOK)
            raise KubeletError("the kubelet removed the agent's socket file during the call")

        error: Exception | None = None
        try:
            async with asyncio.timeout(REGISTER_DEADLINE), asyncio.TaskGroup() as group:
                gone = group.create_task(until_gone())
                await self._registrar.register(endpoint, self._resource.value)
                gone.cancel()
        except* (AgentError, TimeoutError) as failed:
            error = failed.exceptions[0]
        return error

    async def _await_stream(self, registration_id: int) -> None:
        """Wait for the stream of this accepted Register, unless it has come and gone already."""
        deadline = loop_time() + STREAM_DEADLINE
        while (
            self._streams.value == 0
            and self._registration_id == registration_id
            and self._is_bound()
            and self._watch.epoch() == self._kubelet
            and deadline - loop_time() >= 0.001
        ):
            text = "registered, waiting for the kubelet's stream"
            self._publish("registration.accepted", text, registered=True)
            await self._wait(deadline - loop_time())

        if self._streams.value == 0:
            self._retry("registration.no_stream", "registered, but the kubelet has no stream open")

    async def _serve(self) -> None:
        """Wait until the stream or the socket is lost.

        A new kubelet socket alone is no reason to register: it was only touched, because a kubelet
        that starts removes the agent's socket.
        """
        since, self._trigger = loop_time(), ""
        text = "registered, the kubelet takes our lists"
        self._publish("registration.serving", text, registered=True)
        while self._is_bound() and self._streams.value > 0:
            await self._wait(until_tick(LOOK_AGAIN))

        if loop_time() - since >= STABLE_AFTER:
            # It served for a while: this is a new loss, and no reason to wait longer than before.
            self._backoff.reset()
        # A cause that is known already, such as another plugin, tells more than its effect.
        if self._served != self._resource.value:
            self._trigger = "renamed"
        self._trigger = self._trigger or ("stream_lost" if self._is_bound() else "socket_lost")
        self._retry("registration.lost", f"{_LOST[self._trigger]}, registering again")

    def _retry(self, event: str, text: str, delay: float | None = None) -> None:
        """Publish why no registration stands, and try again after `delay` or the back-off's."""
        self._due = loop_time() + (self._backoff.next() if delay is None else delay)
        self._publish(event, text, problem=True)

    def _publish(
        self, event: str, text: str, *, registered: bool = False, problem: bool = False
    ) -> None:
        if self.state.set(RegistrationState(registered, self._streams.value > 0, text)):
            tell = log.warning if problem else log.info
            tell(event, resource=self._resource.value, endpoint=self._serving.endpoint, text=text)

    async def _wait(self, seconds: float) -> None:
        """Wait for a change, so long at most. What came before the call was looked at."""
        await News(self._changes, self._resource).wait(seconds)


def _text(error: Exception) -> str:
    return cap(str(error)) or f"no answer within {REGISTER_DEADLINE:g} s"


# Watches for another device plugin of the agent's resource, and registers again when it is gone.

NVIDIA = "nvidia.com"

SETTLE = 0.5
"""Seconds from a change of its socket file to the check: a plugin binds before it listens, and the
agent's stream may end with it."""


class Rival(msgspec.Struct, frozen=True):
    """The socket of HAMi's or NVIDIA's plugin for a resource; both give it the same name.

    The name omits the resource's domain. So it counts only for resources in NVIDIA's domain: for
    others, the socket may as well be the GPU Operator's for nvidia.com.
    Source: nvinternal/plugin/server.go of both, NewNvidiaDevicePlugin.
    """

    directory: Path
    resource: Cell[str]

    @property
    def name(self) -> str:
        """The socket's base name; empty if none identifies the resource."""
        domain, _, tail = self.resource.value.partition("/")
        return f"nvidia-{tail}.sock" if domain == NVIDIA else ""

    @property
    def path(self) -> str:
        """The socket's path."""
        return os.fspath(self.directory / self.name)

    def answers(self) -> bool | None:
        """Whether a process listens on the socket; None: there is no such socket."""
        return listens(self.directory / self.name) if self.name else None


class Rivals:
    """Watches the rival's socket. `say` posts an Event about the Node.

    Up to and including 1.36, the kubelet uses the plugin that registered last, and tells neither:
    the agent's stream stays open. When the other plugin ends, the kubelet stops the resource
    although the agent serves it. So the agent registers again when the other socket is gone and its
    own stream did not end. A kubelet that starts removes all sockets; then the agent registers
    anyway.
    """

    def __init__(
        self, socket: Rival, registration: Registration, say: Callable[[NodeEvent], None]
    ) -> None:
        self._socket = socket
        self._registration = registration
        self._say = say
        self._news: Cell[int] = Cell(0)
        self.gone: Cell[int] = Cell(0)
        """How many rivals are gone. The ledger does not have their answers."""

    async def run(self) -> NoReturn:
        """Watch the socket for ever."""
        changed, now = News(self._news), self._socket.answers()
        registered = self._registration.registration_id
        while True:
            came = await changed.wait(until_tick(LOOK_AGAIN))
            await asyncio.sleep(SETTLE if came else 0.0)
            changed, before, now = News(self._news), now, self._socket.answers()
            # A rival may come and go between two checks. The removal of a dead file does not count.
            was_here = before or (came and before is None)
            is_same = registered is not None and registered == self._registration.registration_id
            if now and not before:
                resource, path = self._socket.resource.value, self._socket.path
                log.warning("registration.rival", resource=resource, path=path)
                text = (
                    f"Another device plugin serves {resource} at {path}, so the kubelet"
                    " may ask it instead of this agent. Remove it from the node (HAMi's is the"
                    " DaemonSet hami-device-plugin). The agent registers again when it is gone."
                )
                self._say(NodeEvent("PluginConflict", text, warning=True))
            elif not now and was_here and is_same:
                log.info("registration.rival_gone", resource=self._socket.resource.value)
                self._registration.renew()
                self.gone.set(self.gone.value + 1)
            registered = self._registration.registration_id

    def heard(self, name: str) -> None:
        """Take note that a file was created or removed in the socket's directory."""
        if name and name == self._socket.name:
            self._news.set(self._news.value + 1)
