"""Cordons of GPUs, and what may change only on a drained node."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from agent.cluster import NodeEvent
from agent.errors import SettingsError, cap
from agent.ledger import Decider, Ledger, Row
from agent.model import NO_INDEX, GpuUuid, SharedGpu

# Reads the annotation `hami.io/device-cordon` of a Node.
#
# It is a comma list of GPU UUIDs on which HAMi's scheduler, from 2.10 on, places no new pods.
# Spaces around a UUID and empty parts do not count (HAMi v2.10 pkg/device/nvidia/device.go).


class ReportedGpu(msgspec.Struct, frozen=True):
    """A GPU of the Node's register annotation, or of the cordon (index None)."""

    uuid: GpuUuid
    index: int | None = None

    @property
    def words(self) -> str:
        """The index with the UUID, for people; the text is safe to print."""
        uuid = cap(self.uuid, 64)
        return uuid if self.index is None else f"{self.index} ({uuid})"


def read_cordon(text: str | None) -> tuple[GpuUuid, ...]:
    """The UUIDs in the annotation, each once, in their order."""
    words = (word.strip() for word in (text or "").split(","))
    return tuple(dict.fromkeys(GpuUuid(word) for word in words if word))


def cordon_events(
    before: Collection[str], now: Collection[str], gpus: Iterable[SharedGpu]
) -> Iterator[NodeEvent]:
    """The Events about the GPUs of this node whose cordon began or ended."""
    for gpu in gpus:
        words = ReportedGpu(gpu.uuid, None if gpu.gpu.index == NO_INDEX else gpu.gpu.index).words
        if gpu.uuid in now and gpu.uuid not in before:
            text = f"GPU {words} is cordoned: HAMi's scheduler (2.10 and later) places no new pods"
            yield NodeEvent("GpuCordoned", text, warning=False)

        if gpu.uuid in before and gpu.uuid not in now:
            yield NodeEvent("GpuUncordoned", f"GPU {words} is no longer cordoned", warning=False)


# Refuses another scheduler or resource name while containers hold slices.
#
# Otherwise the agent could not tell a container that was answered under the former settings from
# one that asks now.

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

    If rows differ, each of their values fits. The first setting that does not fit is named.
    """
    for setting in wanted:
        rows = [row for row in ledger.rows if _value(row, setting.key)]
        values = [_value(row, setting.key) for row in rows]
        if not values or setting.value in values:
            continue

        pods = {
            f"{row.namespace}/{row.pod}" if row.holder else "pods that the kubelet has not named"
            for row in rows
        }
        more = [f"{len(pods) - MOST_NAMED} more"] if len(pods) > MOST_NAMED else []
        names = ", ".join(sorted(pods)[:MOST_NAMED] + more)
        restart = ", then restart the agent" if setting.key == SCHEDULER else ""

        return SettingsError(
            f"{setting.origin}: {setting.key} cannot change from {values[-1]} to {setting.value} "
            f"while slices are held by {names}; running pods go on",
            remedy=f"drain the node (kubectl drain {node}) or delete what holds them{restart}, or "
            "set it back; slices are held for up to a minute after their pod has gone",
        )

    return None


def _value(row: Row, key: str) -> str:
    """The value that a row was answered under; empty: it fits every one.

    An adopted row fits every scheduler. A row of an earlier agent has no resource name.
    """
    if key == RESOURCE:
        return row.resource

    scheduler = "none" if row.decided_by is Decider.KUBELET else "hami"
    return "" if row.adopted else scheduler
