"""Watches for another device plugin of the agent's resource, and registers again when it is gone.

Up to and including 1.36, the kubelet uses the plugin that registered last, and tells neither: the
agent's stream stays open. When the other plugin ends, the kubelet stops the resource although the
agent serves it. So the agent registers again when the other socket is gone and its own stream did
not end. A kubelet that starts removes all sockets; then the agent registers anyway.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import structlog

from agent.core.cluster.changes import NodeEvent
from agent.kit.cell import Cell, News
from agent.kit.ticks import until_tick
from agent.plugin.registration import Registration
from agent.plugin.sockets import listens

log = structlog.get_logger(__name__)

LOOK_AGAIN = 5.0
"""Seconds between checks. A plugin that is killed leaves its socket file, so no change is seen."""

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
    def names(self) -> tuple[str, ...]:
        """The base names to watch; none if the name does not identify the resource."""
        return (self.name,) if self.resource.value.startswith(f"{NVIDIA}/") else ()

    @property
    def name(self) -> str:
        """The socket's base name."""
        return f"nvidia-{self.resource.value.partition('/')[2]}.sock"

    @property
    def path(self) -> str:
        """The socket's path."""
        return os.fspath(self.directory / self.name)

    def answers(self) -> bool | None:
        """Whether a process listens on the socket; None: there is no such socket."""
        return listens(self.directory / self.name) if self.names else None


class Rivals:
    """Watches the rival's socket. `say` posts an Event about the Node."""

    def __init__(
        self, socket: Rival, registration: Registration, say: Callable[[NodeEvent], None]
    ) -> None:
        self._resource = socket.resource
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
            if came:
                await asyncio.sleep(SETTLE)
            changed, before, now = News(self._news), now, self._socket.answers()
            # A rival may come and go between two checks. The removal of a dead file does not count.
            was_here = before or (came and before is None)
            is_same = registered is not None and registered == self._registration.registration_id
            if now and not before:
                path = self._socket.path
                log.warning("registration.rival", resource=self._resource.value, path=path)
                text = (
                    f"Another device plugin serves {self._resource.value} at {path}, so the kubelet"
                    " may ask it instead of this agent. Remove it from the node (HAMi's is the"
                    " DaemonSet hami-device-plugin). The agent registers again when it is gone."
                )
                self._say(NodeEvent("PluginConflict", text, warning=True))
            elif not now and was_here and is_same:
                log.info("registration.rival_gone", resource=self._resource.value)
                self._registration.renew()
                self.gone.set(self.gone.value + 1)
            registered = self._registration.registration_id

    def heard(self, name: str) -> None:
        """Take note that a file was created or removed in the socket's directory."""
        if name in self._socket.names:
            self._news.set(self._news.value + 1)
