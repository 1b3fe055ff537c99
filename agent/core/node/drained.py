"""Refuses another scheduler or resource name while containers hold slices.

Otherwise the agent could not tell a container that was answered under the former settings from one
that asks now.
"""

import dataclasses
from collections.abc import Sequence
from typing import Final

from agent.core.errors import SettingsError
from agent.core.state.ledger import Decider, Ledger, Row

SCHEDULER: Final = "scheduler"
RESOURCE: Final = "sharing.resourceName"

MOST_NAMED: Final = 3
"""Pods that a refusal names. It counts the others."""


@dataclasses.dataclass(frozen=True, slots=True)
class LastingSetting:
    """A setting that can change only on a drained node. `origin`: where its value is from."""

    key: str
    value: str
    origin: str = dataclasses.field(compare=False)


def undrained(wanted: Sequence[LastingSetting], ledger: Ledger, node: str) -> SettingsError | None:
    """Why `node` cannot have these settings yet; None: the answers of all rows fit them.

    If rows differ, each of their values fits.
    """
    changes: list[str] = []
    restart = ""
    for setting in wanted:
        rows = [row for row in ledger.rows if _value(row, setting.key)]
        values = [_value(row, setting.key) for row in rows]
        if not values or setting.value in values:
            continue
        pods = sorted({f"{row.namespace}/{row.pod}" for row in rows if row.holder})
        names = pods[:MOST_NAMED]
        if len(pods) > MOST_NAMED:
            names.append(f"{len(pods) - MOST_NAMED} more")
        if not all(row.holder for row in rows):
            names.append("pods that the kubelet has not named")
        changes.append(
            f"{setting.origin}: {setting.key} cannot change from {values[-1]} to {setting.value} "
            f"while slices are held by {', '.join(names)}"
        )
        restart = restart or (", then restart the agent" if setting.key == SCHEDULER else "")
    if not changes:
        return None
    return SettingsError(
        f"{' and '.join(changes)}; running pods go on; drain the node (kubectl drain {node}) or "
        f"delete what holds them{restart}, or set it back; slices are held for up to a minute "
        "after their pod has gone"
    )


def _value(row: Row, key: str) -> str:
    """The value that a row was answered under; empty: it fits every one.

    An adopted row fits every scheduler. A row of an earlier agent has no resource name.
    """
    if key == RESOURCE:
        return row.resource
    if row.adopted:
        return ""
    return "none" if row.decided_by is Decider.KUBELET else "hami"
