"""Decides how the annotation `hami.io/device-cordon` of a Node changes.

It is a comma list of GPU UUIDs on which HAMi's scheduler, from 2.10 on, places no new pods. Spaces
around a UUID and empty parts do not count (HAMi v2.10 pkg/device/nvidia/device.go).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from agent.core.cluster.annotations import CORDON, HANDSHAKE
from agent.core.cluster.changes import NodeEvent
from agent.core.errors import cap
from agent.core.inventory.gpu import NO_INDEX, GpuUuid
from agent.core.inventory.inventory import SharedGpu


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
