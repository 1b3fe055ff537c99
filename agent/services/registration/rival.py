"""Another device plugin for our resource that comes beside this agent, and goes again.

Up to kubelet 1.36 who registers last is asked, and nobody is told: our stream stays open, and when
the other one ends, the kubelet takes the resource for ended although we serve it. So its socket is
watched, and when it is gone and our stream did not end with it, we begin anew. A kubelet that
starts removes all sockets: then we register with it anyway, and the other one may live.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import NoReturn, Protocol

import structlog

from agent.core.cluster.changes import NodeEvent
from agent.kit.cell import Cell

log = structlog.get_logger(__name__)

LOOK_AGAIN = 5.0
"""Seconds between looks: a plugin that is killed leaves its socket, and no news."""

SETTLE = 0.5
"""Seconds after news of its socket: it binds before it listens, and our stream may end with it."""


class RivalSocket(Protocol):
    """Where the other plugin of our resource would serve, by the name that it gives its socket."""

    @property
    def path(self) -> str:
        """The socket."""
        ...

    @property
    def names(self) -> Collection[str]:
        """The base names whose coming and going tells of it; none where none does."""
        ...

    def answers(self) -> bool | None:
        """Whether somebody listens there; None: there is no such socket."""
        ...


class RegistrationSpell(Protocol):
    """Our registration."""

    @property
    def spell(self) -> int | None:
        """A number that changes with each registration and each end of the streams.

        None: the kubelet takes no lists now.
        """
        ...

    def renew(self) -> None:
        """Serve on a new socket and register it."""
        ...


class Rivals:
    """Looks out for the other plugin of our resource. `say` posts an Event about the Node."""

    def __init__(
        self,
        resource: Cell[str],
        socket: RivalSocket,
        registered: RegistrationSpell,
        say: Callable[[NodeEvent], None],
    ) -> None:
        self._resource = resource
        self._socket = socket
        self._registered = registered
        self._say = say
        self._news: Cell[int] = Cell(0)
        self.gone: Cell[int] = Cell(0)
        """How many are gone again: what they answered is not ours."""

    async def run(self) -> NoReturn:
        """Look at its socket for ever."""
        now, spell, seen = self._socket.answers(), self._registered.spell, self._news.value
        while True:
            came = await self._next(seen)
            if came:
                await asyncio.sleep(SETTLE)
            seen, before, now = self._news.value, now, self._socket.answers()
            # It may have come and gone between two looks; a dead file that is removed is no news.
            was_here = before or (came and before is None)
            if now and not before:
                self._tell()
            elif not now and was_here and spell is not None and spell == self._registered.spell:
                log.info("registration.rival_gone", resource=self._resource.value)
                self._registered.renew()
                self.gone.set(self.gone.value + 1)
            spell = self._registered.spell

    def heard(self, name: str) -> None:
        """A name came or went in the directory of its socket."""
        if name in self._socket.names:
            self._news.set(self._news.value + 1)

    async def _next(self, seen: int) -> bool:
        """True for news since `seen`; False: it is time to look all the same."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_AGAIN):
                await self._news.until(lambda news: news != seen)
                return True
        return False

    def _tell(self) -> None:
        path = self._socket.path
        log.warning("registration.rival", resource=self._resource.value, path=path)
        text = (
            f"Another device plugin began to serve {self._resource.value} at {path} beside this "
            "agent, and the kubelet may ask it: take it off the node (HAMi's: the DaemonSet "
            "hami-device-plugin); when it is gone, the agent registers again."
        )
        self._say(NodeEvent("PluginConflict", text, warning=True))
