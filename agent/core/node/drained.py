"""Refuses another scheduler or resource name while containers hold slices.

Otherwise the agent could not tell a container that was answered under the former settings from one
that asks now.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

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
    origin: str = dataclasses.field(compare=False)


class _Hold(msgspec.Struct, frozen=True):
    """A pod that holds slices, and the settings of its answer; empty: fits all settings."""

    pod: str
    slices: int
    scheduler: str
    resource: str

    def value(self, key: str) -> str:
        return {SCHEDULER: self.scheduler, RESOURCE: self.resource}[key]


def undrained(wanted: Sequence[LastingSetting], ledger: Ledger, node: str) -> SettingsError | None:
    """Why `node` cannot have these settings yet; None: the answers of all rows fit them.

    An adopted row fits every scheduler. A row without a resource name fits every name. If rows
    differ, each of their values fits.
    """
    holds = tuple(_holds(ledger))
    now: dict[str, str] = {}
    for setting in wanted:
        found = [value for hold in holds if (value := hold.value(setting.key))]
        if found and setting.value not in found:
            now[setting.key] = found[-1]
    if not now:
        return None
    holds = tuple(hold for hold in holds if any(map(hold.value, now)))
    changes = " and ".join(
        f"{one.origin}: {one.key} cannot change from {now[one.key]} to {one.value}"
        for one in wanted
        if one.key in now
    )
    old = " and ".join(now.values())
    restart = ", then restart the agent" if SCHEDULER in now else ""
    pods = sorted({hold.pod for hold in holds} - {""})
    unnamed = sum(hold.slices for hold in holds if not hold.pod)
    more = f" and {len(pods) - MOST_NAMED} more" if len(pods) > MOST_NAMED else ""
    held = f"slices are held by {_count(len(pods), 'pod')} ({', '.join(pods[:MOST_NAMED])}{more})"
    if unnamed:
        loose = f"{_count(unnamed, 'slice')} of pods that the kubelet has not named"
        held = f"{held}, and {loose}" if pods else f"{loose} are held"
    return SettingsError(
        f"{changes} while {held}; running pods go on; drain the node (kubectl drain {node}) "
        f"or delete what holds them{restart}, or set it back to {old}; slices are held for up to a "
        "minute after their pod has gone"
    )


def _holds(ledger: Ledger) -> Iterator[_Hold]:
    for row in ledger.rows:
        pod = f"{row.namespace}/{row.pod}" if row.holder else ""
        scheduler = "" if row.adopted else _SCHEDULERS[row.decided_by]
        yield _Hold(pod, len(row.slice_ids), scheduler, row.resource)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
