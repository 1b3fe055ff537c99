"""Cordons of GPUs, and what may change only on a drained node."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from agent.cluster import CORDON, HANDSHAKE, NodeEvent
from agent.errors import SettingsError, cap
from agent.ledger import Decider, Ledger, Row
from agent.model import NO_INDEX, GpuUuid, SharedGpu

# Decides how the annotation `hami.io/device-cordon` of a Node changes.
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


class CordonEdit(msgspec.Struct, frozen=True):
    """What to write for one GPU. `changes` empty: the Node already says it; None removes."""

    gpu: ReportedGpu
    changes: Mapping[str, str | None]


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


def known_gpus(reported: Iterable[ReportedGpu], cordon: str | None) -> tuple[ReportedGpu, ...]:
    """The GPUs that can be named: those reported, then those that are only in the cordon."""
    gpus = {gpu.uuid: gpu for gpu in reported}
    gone = {uuid: ReportedGpu(uuid) for uuid in read_cordon(cordon) if uuid not in gpus}
    return (*gpus.values(), *gone.values())


def find_gpu(gpus: Sequence[ReportedGpu], name: str) -> ReportedGpu | None:
    """The GPU of that index or UUID; None if there is none."""
    by_index = (gpu for gpu in gpus if gpu.index is not None and str(gpu.index) == name)
    by_uuid = (gpu for gpu in gpus if gpu.uuid.lower() == name.lower())
    return next(by_index, None) or next(by_uuid, None)


def cordon_edit(gpu: ReportedGpu, annotations: Mapping[str, str], *, cordon: bool) -> CordonEdit:
    """What to write so that the GPU is cordoned, or with `cordon` False is not.

    A scheduler takes in a cordon only when it reads the Node's report anew. Removing the handshake
    makes releases from 2.9 on do so within 15 s (HAMi v2.10 pkg/device/devices.go, CheckHealth).
    """
    uuids = read_cordon(annotations.get(CORDON))
    if (gpu.uuid in uuids) is cordon:
        return CordonEdit(gpu, {})
    kept = (*uuids, gpu.uuid) if cordon else tuple(uuid for uuid in uuids if uuid != gpu.uuid)
    changes: dict[str, str | None] = {CORDON: ",".join(kept) or None}
    if HANDSHAKE in annotations:
        changes[HANDSHAKE] = None
    return CordonEdit(gpu, changes)


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
        f"{' and '.join(changes)}; running pods go on",
        remedy=f"drain the node (kubectl drain {node}) or delete what holds them{restart}, or set "
        "it back; slices are held for up to a minute after their pod has gone",
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
