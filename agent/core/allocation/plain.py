"""Plain mode's answers: the kubelet's ids decide, and nobody says which pod asks.

Each answer is an identity of its own, because the same ids can come again while they are held: the
kubelet forgets, after a lost checkpoint or a List during an Allocate. Only one case is taken for a
repetition, see `asked_again`.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from agent.core.cluster.pods import PodUid
from agent.core.containers.container_edits import (
    EditRequest,
    container_edits,
    cuda_order,
    gpu_edits,
)
from agent.core.containers.edits import ContainerEdits, EditSettings, GrantedShare, HookFacts
from agent.core.errors import Refusal, RefusalReason, cap
from agent.core.inventory.condition import Condition
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory, SharedGpu
from agent.core.inventory.share import Share
from agent.core.inventory.slices import SliceId, split_slice_id
from agent.core.state.holdings import KubeletEpoch
from agent.core.state.ledger import PLAIN, Row

MOST_IDS = 10_000
"""More slices than any container asks for; a longer request is refused unread."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlainSettings:
    """`memory_limits`: each slice is an equal part of its GPU's memory, kept by HAMi-core."""

    memory_limits: bool = False


def grant(
    ids: Sequence[SliceId], inventory: Inventory, held: Collection[SliceId]
) -> tuple[GrantedShare, ...]:
    """The GPUs that the ids stand for, each once, in PCI order; slices of one GPU add up.

    `held` ids count as known whatever the split count is now.

    Raises:
        Refusal: the request is malformed, or names a slice or GPU that cannot be given.
    """
    counts = _counted(ids)
    for text in ids:
        _check_number(text, inventory, held)
    granted = (_granted(_usable(uuid, inventory), count) for uuid, count in counts.items())
    return cuda_order(granted)


def _counted(ids: Sequence[SliceId]) -> Counter[GpuUuid]:
    """How many slices of each GPU are asked for."""
    if len(ids) > MOST_IDS:
        raise Refusal(
            RefusalReason.TOO_MANY_SLICES,
            f"The container asks for {len(ids)} slices, and no answer has more than {MOST_IDS}; "
            "ask for fewer.",
        )
    counts: Counter[GpuUuid] = Counter()
    for text, times in Counter(ids).items():
        if times > 1:
            raise Refusal(
                RefusalReason.REPEATED_SLICE,
                f"The kubelet named slice {cap(text, 80)} {times} times in one request; create the "
                "pod again.",
            )
        pair = split_slice_id(text)
        if pair is None:
            raise Refusal(
                RefusalReason.UNKNOWN_SLICE,
                f"The kubelet named {cap(text, 80)!r}, which is not the id of a slice; look for "
                "another plugin that serves this resource.",
            )
        counts[pair[0]] += 1
    return counts


def _check_number(text: SliceId, inventory: Inventory, held: Collection[SliceId]) -> None:
    pair = split_slice_id(text)
    gpu = inventory.find(pair[0]) if pair else None
    if pair and gpu and pair[1] >= gpu.split_count and text not in held:
        raise Refusal(
            RefusalReason.UNKNOWN_SLICE,
            f"GPU {gpu.gpu.label} has {gpu.split_count} slices, and {cap(text, 80)} is none of "
            "them; create the pod again.",
        )


def _usable(uuid: GpuUuid, inventory: Inventory) -> SharedGpu:
    gpu = inventory.find(uuid)
    if gpu is None:
        raise Refusal(
            RefusalReason.UNKNOWN_GPU,
            f"The kubelet named GPU {cap(uuid, 64)}, which this node does not share; create the "
            "pod again.",
        )
    if gpu.present and not gpu.serving and gpu.health.condition is Condition.UNMONITORED:
        raise Refusal(
            RefusalReason.DRIVER_UNRESPONSIVE,
            f"The driver has not answered for {gpu.gpu.title} for too long; ask the "
            "operator to look at the node's driver.",
            transient=True,
        )
    if not gpu.serving:
        raise Refusal(
            RefusalReason.BAD_GPU,
            f"{gpu.gpu.title} {gpu.plight}; create the pod again, so that it gets another GPU.",
        )
    return gpu


def slice_mib(gpu: SharedGpu) -> int:
    """MiB of one slice: an equal part of what is registered.

    Never 0, which would mean all of the memory.
    """
    return max(gpu.registered_mib // gpu.split_count, 1)


def _granted(gpu: SharedGpu, count: int) -> GrantedShare:
    share = Share(gpu.uuid, memory_mib=count * slice_mib(gpu), core_percent=0)
    return GrantedShare(share, gpu.gpu.pci, gpu.registered_mib, gpu.gpu.minor)


def edits_of(
    uid: PodUid,
    granted: tuple[GrantedShare, ...],
    plain: PlainSettings,
    edits: EditSettings,
    facts: HookFacts,
) -> ContainerEdits:
    """The answer: the GPUs, with HAMi-core and limits only where the operator wants them.

    Raises:
        SettingsError: no answer can be made with these settings.
    """
    if plain.memory_limits:
        request = EditRequest(uid, PLAIN, control_disabled=False, shares=granted)
        return container_edits(request, edits, facts)
    return gpu_edits(f"{uid}/{PLAIN}", granted, edits, facts)


def asked_again(ids: Iterable[SliceId], rows: Iterable[Row], epoch: KubeletEpoch) -> Row | None:
    """The row to answer again if no container is on record with these ids, or None.

    It holds exactly these ids, was answered to an earlier kubelet, and nobody was ever seen to have
    booked it. If the kubelet's checkpoint file does not name the ids either, that kubelet died
    before it wrote the answer down, and a container starts only after that: whoever asks now, no
    container lives in the row's directory.

    A booked row is never taken: a container that restarts after a lost checkpoint cannot be told
    from another one that was given the ids of a container which still runs.
    """
    wanted = frozenset(ids)
    fitting = [
        row
        for row in rows
        if not row.confirmed and row.epoch != epoch and frozenset(row.slice_ids) == wanted
    ]
    return max(fitting, key=lambda row: row.answered_at, default=None)
