"""Orders the turns of a client that starts several at once and can use only the last one granted.

A turn is a question and then a request for the ids in its answer. A grant to an earlier turn breaks
the client. The ids tell which question a request belongs to.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import msgspec

BOOKING = 0.1
"""Seconds that the client has after an answer to record it."""

CLOSE = 0.01
"""Seconds: two turns that begin within this time can arrive in the other order."""

BEGUN = 5.0
"""Seconds after which a question is forgotten: a client requests at once."""

MOST = 64
"""Questions remembered: more than the client has open at once."""


class Turn(msgspec.Struct, eq=False):
    """One turn of `client`; `at` is the loop time of its beginning.

    - `ids`: those that it heard or requests.
    - `overtaken`: a later turn began, so this one must not be granted.
    - `may_be_stale`: it began so soon after another that it may be overtaken too.
    - `overlapped`: another request was open at the same time.
    - `yields`: it is refused unless it is alone.
    - `there`: whether what the question looked for was there. `all_there`: everything that was
      there then; None: not known.
    - `beside`: the turns that were open when this one began, until a later one begins.
    - `over`: set when its answer is being sent.
    """

    at: float
    client: object
    ids: frozenset[str] = frozenset()
    overtaken: bool = False
    may_be_stale: bool = False
    overlapped: bool = False
    yields: bool = False
    there: Mapping[tuple[str, str], bool] = msgspec.field(default_factory=dict)
    all_there: frozenset[tuple[str, str]] | None = None
    beside: tuple["Turn", ...] = ()
    over: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    @property
    def is_lost(self) -> bool:
        """Whether it must not be granted: another one overtook it, or may have."""
        return self.overtaken or (self.yields and self.overlapped)


class CallOrder:
    """The open turns: questions without a request yet, and requests.

    `client` names the present client: no request follows a question of its predecessor.
    """

    def __init__(self, client: Callable[[], object]) -> None:
        self._client = client
        self._questions: deque[Turn] = deque(maxlen=MOST)
        self._requests: list[Turn] = []

    def begin(self) -> Turn:
        """Begin a turn with a question; the caller sets `ids` to those in its answer."""
        turn = self._begin()
        self._questions.append(turn)
        return turn

    def offered(self) -> frozenset[str]:
        """The ids in the answers of turns whose request has not come."""
        return frozenset(text for question in self._recent() for text in question.ids)

    @contextmanager
    def asked(self, ids: Collection[str]) -> Iterator[Turn]:
        """The turn of a request for these ids, open while the block runs."""
        wanted = frozenset(ids)
        same = [question for question in self._recent() if question.ids == wanted]
        if same:
            turn = same[-1]
            self._questions.remove(turn)
            for earlier in same[:-1]:  # it cannot be known which of them it belongs to
                earlier.overtaken = turn.overtaken = True
        else:
            turn = self._begin()
            turn.ids = wanted
        self._requests.append(turn)
        if len(self._requests) > 1:
            for other in self._requests:
                other.overlapped = True
        try:
            yield turn
        finally:
            self._requests.remove(turn)
            turn.over.set()

    async def until_alone(self, turn: Turn) -> None:
        """Return once no other request that may be granted is open and all are recorded."""
        while True:
            for other in self._others(turn):
                await other.over.wait()
            await asyncio.sleep(BOOKING)
            if not self._others(turn):
                return

    def _others(self, turn: Turn) -> list[Turn]:
        others = (other for other in self._requests if other is not turn)
        return [other for other in others if not (other.yields or other.overtaken)]

    def _begin(self) -> Turn:
        turn = Turn(asyncio.get_running_loop().time(), self._client())
        turn.beside = (*self._requests, *self._recent())
        for earlier in (*self._requests, *self._questions):
            earlier.overtaken, earlier.beside = True, ()  # no turn keeps all before it alive
            turn.may_be_stale |= turn.at - earlier.at < CLOSE and earlier.client == turn.client
        return turn

    def _recent(self) -> list[Turn]:
        """The questions whose request may still come, in their order."""
        since, client = asyncio.get_running_loop().time() - BEGUN, self._client()
        return [turn for turn in self._questions if turn.at > since and turn.client == client]
