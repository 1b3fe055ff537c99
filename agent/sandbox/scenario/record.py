"""Records the results of the claims, the timeline and the measurements."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

NOT_REACHED: Final = "the scenario ended before"


@dataclass(frozen=True, slots=True)
class ScenarioClaim:
    """One claim and its result. `measured`: what the check found."""

    id: str
    sentence: str
    ok: bool
    measured: str


@dataclass(frozen=True, slots=True)
class Moment:
    """One entry of the timeline, `elapsed` seconds after its start; `ok` None: not a claim."""

    elapsed: float
    text: str
    detail: str = ""
    ok: bool | None = None
    claim: str = ""


class Unmet(Exception):  # noqa: N818 -- a claim that was not met, not an error of ours
    """A wait had no result, so the scenario cannot continue."""


@dataclass(eq=False, slots=True)
class ScenarioRecord:
    """The record that the steps fill. `promised`: claim id → sentence, in order.

    `awaited`: what the present step waits for; empty if it does not wait.
    """

    promised: Mapping[str, str]
    tell: Callable[[Moment], None]
    started: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    moments: list[Moment] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    awaited: str = ""
    _found: dict[str, tuple[bool, str]] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Add an entry to the timeline that is not a claim."""
        self._add(Moment(self.elapsed, text))

    def settle(self, claim: str, measured: str, problems: Iterable[str] = ()) -> None:
        """Set the result of one claim: true without problems. A false claim stays false.

        Raises:
            KeyError: the claim is not in `promised`.
        """
        sentence, found = self.promised[claim], list(problems)
        before = self._found.get(claim, (True, ""))[0]
        ok = before and not found
        text = "; ".join(found) if found else measured
        self._found[claim] = (ok, text)
        self._add(Moment(self.elapsed, sentence, text, ok, claim))

    @property
    def claims(self) -> tuple[ScenarioClaim, ...]:
        """Every promised claim. One that was not checked is not true."""
        return tuple(
            ScenarioClaim(name, sentence, *self._found.get(name, (False, NOT_REACHED)))
            for name, sentence in self.promised.items()
        )

    @property
    def ok(self) -> bool:
        """Whether every claim was checked and true."""
        return all(claim.ok for claim in self.claims)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return asyncio.get_running_loop().time() - self.started

    def _add(self, moment: Moment) -> None:
        self.awaited = ""
        self.moments.append(moment)
        self.tell(moment)
