"""The turns of a client that begins with several things at once and bears only its last one.

It begins with a question and asks for what it heard then. A grant to any turn but the last that it
began with would break it. Which question belongs to which request is told by what was heard.
"""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

BOOKING = 0.1
"""Seconds that the client is given after an answer to put it into its books."""

CLOSE = 0.01
"""Seconds within which two that were begun can arrive in the other order."""

BEGUN = 5.0
"""Seconds after which a question is no beginning any more: its request follows at once."""

MOST = 64
"""Questions that are remembered: more than the client has under way at once."""


@dataclasses.dataclass(eq=False, slots=True)
class Turn:
    """One thing that `client` has begun with, on the loop's clock.

    `ids` is what it heard or asks for. `overtaken`: it began with another one since, and must not
    be granted this. `doubted`: it came so close behind another one that this may be overtaken, too.
    `yields`: this is refused if it is not alone. `over` is set when the answer is
    on its way.
    """

    at: float
    client: object
    ids: frozenset[str] = frozenset()
    overtaken: bool = False
    doubted: bool = False
    yields: bool = False
    over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class Turns:
    """The turns that are under way: questions whose request has not come, and requests.

    `client` names the one that is there now: what its predecessor asked, nobody goes on with.
    """

    def __init__(self, client: Callable[[], object]) -> None:
        self._client = client
        self._questions: deque[Turn] = deque(maxlen=MOST)
        self._requests: list[Turn] = []

    def begin(self) -> Turn:
        """The client begins with a question; what it hears is to be set as `ids`."""
        turn = self._begin()
        self._questions.append(turn)
        return turn

    def offered(self) -> frozenset[str]:
        """What was heard in turns whose request is still to come."""
        return frozenset(text for one in self._recent() for text in one.ids)

    @contextmanager
    def asked(self, ids: Collection[str]) -> Iterator[Turn]:
        """A request for these, from its arrival to its answer."""
        turn = self._begun_with(frozenset(ids))
        self._requests.append(turn)
        try:
            yield turn
        finally:
            self._requests.remove(turn)
            turn.over.set()

    async def until_alone(self, turn: Turn) -> None:
        """Return once no other request is under way that may be granted, and all are booked."""
        others = self._others(turn)
        while True:
            for one in others:
                await one.over.wait()
            await asyncio.sleep(BOOKING)
            others = self._others(turn)
            if not others:
                return

    def _others(self, turn: Turn) -> list[Turn]:
        """The other requests under way that may be granted."""
        return [
            one for one in self._requests if one is not turn and not (one.yields or one.overtaken)
        ]

    def _begin(self) -> Turn:
        turn = Turn(asyncio.get_running_loop().time(), self._client())
        for earlier in (*self._requests, *self._questions):
            earlier.overtaken = True
            turn.doubted |= turn.at - earlier.at < CLOSE and earlier.client == turn.client
        return turn

    def _begun_with(self, ids: frozenset[str]) -> Turn:
        """The turn in which these are asked for.

        Without a question it begins now. Of several that heard the same, nobody knows which it is.
        """
        same = [one for one in self._recent() if one.ids == ids]
        if not same:
            turn = self._begin()
            turn.ids = ids
            return turn
        for one in same[:-1]:
            one.overtaken = same[-1].overtaken = True
        self._questions.remove(same[-1])
        return same[-1]

    def _recent(self) -> list[Turn]:
        """The questions whose request may still come, in their order."""
        since, client = asyncio.get_running_loop().time() - BEGUN, self._client()
        return [one for one in self._questions if one.at > since and one.client == client]
