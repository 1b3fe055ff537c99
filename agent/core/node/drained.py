"""What a node keeps while containers hold slices: its scheduler and the name of its resource.

Pods ask by the name, and the scheduler's choices are in what they were answered: a container that
was answered under other settings could not be told from one that asks now.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from agent.core.errors import SettingsError
from agent.core.state.ledger import Decider, Ledger

SCHEDULER: Final = "scheduler"
RESOURCE: Final = "sharing.resourceName"

_SCHEDULERS: Final = {Decider.SCHEDULER: "hami", Decider.KUBELET: "none"}

MOST_NAMED = 3
"""Pods that a refusal names; the others are counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class LastingSetting:
    """A setting that needs a drained node to change: its key, its value and where that is from."""

    key: str
    value: str
    origin: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Hold:
    """Who holds slices, and under which settings it was answered; empty: under any."""

    pod: str
    slices: int
    scheduler: str
    resource: str

    def value(self, key: str) -> str:
        return {SCHEDULER: self.scheduler, RESOURCE: self.resource}[key]


def undrained(wanted: Sequence[LastingSetting], ledger: Ledger, node: str) -> SettingsError | None:
    """Why such settings are refused on `node`; None: no row was answered under others.

    A row that was only adopted fits every scheduler, one from before names were kept every name.
    """
    for one in wanted:
        holds = [hold for hold in _holds(ledger) if hold.value(one.key)]
        values = {hold.value(one.key): None for hold in holds}
        if values and one.value not in values:
            return SettingsError(_sentence(one, ", ".join(values), holds, node))
    return None


def _holds(ledger: Ledger) -> Iterator[_Hold]:
    for row in ledger.rows:
        pod = f"{row.namespace}/{row.pod}" if row.holder else ""
        scheduler = "" if row.adopted else _SCHEDULERS[row.decided_by]
        yield _Hold(pod, len(row.slice_ids), scheduler, row.resource)


def _sentence(one: LastingSetting, now: str, holds: Sequence[_Hold], node: str) -> str:
    restart = ", then restart the agent" if one.key == SCHEDULER else ""
    return (
        f"{one.origin}: {one.key}: {one.value} cannot replace {now} while {_held(holds)}; drain "
        f"the node (kubectl drain {node}) or delete what holds them{restart}, or set it back to "
        f"{now}"
    )


def _held(holds: Sequence[_Hold]) -> str:
    """How many pods hold slices, and which; of those without a name only the slices are known."""
    pods = sorted({hold.pod for hold in holds} - {""})
    unnamed = sum(hold.slices for hold in holds if not hold.pod)
    more = f" and {len(pods) - MOST_NAMED} more" if len(pods) > MOST_NAMED else ""
    named = f"{_count(len(pods), 'pod')} ({', '.join(pods[:MOST_NAMED])}{more})"
    loose = f"{_count(unnamed, 'slice')} of pods that the kubelet has not named"
    if not unnamed:
        return f"slices are held by {named}"
    return f"{loose} are held" if not pods else f"slices are held by {named}, and {loose}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
