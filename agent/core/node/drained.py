"""Refuses a new scheduler or resource name while containers hold slices.

Otherwise the agent could not tell a container that was answered under the former settings from one
that asks now.
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
"""Pods that a refusal names. It counts the others."""


@dataclasses.dataclass(frozen=True, slots=True)
class LastingSetting:
    """A setting that can change only on a drained node. `origin`: where its value is from."""

    key: str
    value: str
    origin: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Hold:
    """A pod that holds slices, and the settings of its answer; empty: fits all settings."""

    pod: str
    slices: int
    scheduler: str
    resource: str

    def value(self, key: str) -> str:
        return {SCHEDULER: self.scheduler, RESOURCE: self.resource}[key]


def undrained(wanted: Sequence[LastingSetting], ledger: Ledger, node: str) -> SettingsError | None:
    """Why the settings are refused on `node`; None: the answers of all rows fit them.

    An adopted row fits every scheduler. A row without a resource name fits every name.
    """
    for setting in wanted:
        holds = [hold for hold in _holds(ledger) if hold.value(setting.key)]
        values = {hold.value(setting.key): None for hold in holds}
        if values and setting.value not in values:
            return SettingsError(_sentence(setting, ", ".join(values), holds, node))
    return None


def _holds(ledger: Ledger) -> Iterator[_Hold]:
    for row in ledger.rows:
        pod = f"{row.namespace}/{row.pod}" if row.holder else ""
        scheduler = "" if row.adopted else _SCHEDULERS[row.decided_by]
        yield _Hold(pod, len(row.slice_ids), scheduler, row.resource)


def _sentence(wanted: LastingSetting, now: str, holds: Sequence[_Hold], node: str) -> str:
    restart = ", then restart the agent" if wanted.key == SCHEDULER else ""
    return (
        f"{wanted.origin}: {wanted.key}: {wanted.value} cannot replace {now} while {_held(holds)}; "
        f"drain the node (kubectl drain {node}) or delete what holds them{restart}, or set it back "
        f"to {now}"
    )


def _held(holds: Sequence[_Hold]) -> str:
    """Which pods hold slices, and how many slices belong to pods that are not known."""
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
