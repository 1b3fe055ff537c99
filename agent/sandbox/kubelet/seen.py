"""A bounded log of the kubelet model's events, with waiting for new ones."""

import asyncio
import datetime as dt
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from agent.ports import Clock

SeenKind = Literal[
    "started",
    "exited",
    "panicked",
    "registered",
    "register_refused",
    "listed",
    "disconnected",
    "removed",
    "preferring",
    "preferred",
    "allocating",
    "allocated",
    "allocate_refused",
    "prestarted",
    "prestart_refused",
    "admitting",
    "admitted",
    "rejected",
    "leaving",
    "ended",
    "container_started",
    "init_ended",
    "container_waiting",
    "checkpoint_lost",
    "checkpoint_unwritten",
]


@dataclass(frozen=True, slots=True)
class KubeletEvent:
    """One event. `elapsed`: loop time in seconds; `ids`: the request; `text`: the answer."""

    at: dt.datetime
    elapsed: float
    kind: SeenKind
    resource: str = ""
    pod: str = ""
    container: str = ""
    ids: tuple[str, ...] = ()
    text: str = ""


class KubeletLog:
    """The last `limit` events, oldest first. It survives restarts of the kubelet."""

    def __init__(self, clock: Clock, limit: int = 10_000) -> None:
        self._clock = clock
        self._events: deque[KubeletEvent] = deque(maxlen=limit)
        self._waiters: list[asyncio.Future[None]] = []
        self._listeners: list[Callable[[KubeletEvent], None]] = []

    def note(
        self,
        kind: SeenKind,
        *,
        resource: str = "",
        pod: str = "",
        container: str = "",
        ids: Iterable[str] = (),
        text: str = "",
    ) -> None:
        """Add an event, call the listeners and wake all waiters."""
        elapsed = asyncio.get_running_loop().time()
        event = KubeletEvent(
            self._clock.now(), elapsed, kind, resource, pod, container, tuple(ids), text
        )
        self._events.append(event)
        for listener in self._listeners:
            listener(event)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def listen(self, listener: Callable[[KubeletEvent], None]) -> None:
        """Call `listener` with every event from now on; it must return at once."""
        self._listeners.append(listener)

    def of(self, *kinds: SeenKind) -> list[KubeletEvent]:
        """The kept events of these kinds."""
        return [event for event in self._events if event.kind in kinds]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`, checked after every event. The caller sets the deadline."""
        while not holds():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def __iter__(self) -> Iterator[KubeletEvent]:
        return iter(tuple(self._events))

    def __len__(self) -> int:
        return len(self._events)
