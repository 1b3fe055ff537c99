"""Cordons of GPUs."""

from collections.abc import Collection, Iterable, Iterator

import msgspec

from agent.cluster import NodeEvent
from agent.errors import cap
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
