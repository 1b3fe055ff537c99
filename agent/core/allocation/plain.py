"""Makes plain mode's answers: the kubelet's ids decide what a container gets.

Each answer gets its own row, because the kubelet can name ids again while a container holds them:
after a lost checkpoint, or after a List during an Allocate. The only replay is in `asked_again`.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import msgspec

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
from agent.core.state.ledger import PLAIN, Decider, Row

MOST_IDS = 10_000
"""More slices than any container asks for. A longer request is refused."""


class PlainSettings(msgspec.Struct, frozen=True):
    """`memory_limits`: HAMi-core limits each slice to an equal part of its GPU's memory."""

    memory_limits: bool = False


def grant(
    ids: Sequence[SliceId], inventory: Inventory, held: Collection[SliceId]
) -> tuple[GrantedShare, ...]:
    """The shares of the ids, one for each GPU, in PCI order.

    `held` ids are valid whatever the split count is now.

    Raises:
        Refusal: the request is malformed, or names a slice or GPU that cannot be given.
    """
    counts = _counted(ids)
    for text in ids:
        _check_number(text, inventory, held)
    granted = (_granted(_usable(uuid, inventory), count) for uuid, count in counts.items())
    return cuda_order(granted)


def _counted(ids: Sequence[SliceId]) -> Counter[GpuUuid]:
    """The number of requested slices of each GPU. Raises Refusal."""
    if len(ids) > MOST_IDS:
        raise Refusal(
            RefusalReason.TOO_MANY_SLICES,
            f"The container asks for {len(ids)} slices, which is more than {MOST_IDS}; ask for "
            "fewer.",
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
                f"The kubelet named {cap(text, 80)!r}, which is not the id of a slice; ask the "
                "operator whether another plugin serves this resource.",
            )
        counts[pair[0]] += 1
    return counts


def _check_number(text: SliceId, inventory: Inventory, held: Collection[SliceId]) -> None:
    pair = split_slice_id(text)
    gpu = inventory.find(pair[0]) if pair else None
    if pair and gpu and pair[1] >= gpu.split_count and text not in held:
        raise Refusal(
            RefusalReason.UNKNOWN_SLICE,
            f"The kubelet named slice {cap(text, 80)}, but GPU {gpu.gpu.label} has only "
            f"{gpu.split_count} slices; create the pod again.",
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
            "operator to check the node's driver.",
            transient=True,
        )
    if not gpu.serving:
        raise Refusal(
            RefusalReason.BAD_GPU,
            f"{gpu.gpu.title} {gpu.plight}; create the pod again, so that it gets another GPU.",
        )
    return gpu


def slice_mib(gpu: SharedGpu) -> int:
    """The memory of one slice in MiB: an equal part of the registered memory, at least 1."""
    # A limit of 0 would mean all of the memory.
    return max(gpu.registered_mib // gpu.split_count, 1)


def _granted(gpu: SharedGpu, count: int) -> GrantedShare:
    share = Share(gpu.uuid, memory_mib=count * slice_mib(gpu), core_percent=0)
    return GrantedShare(share, gpu.gpu.pci, gpu.registered_mib, gpu.gpu.minor, gpu.gpu.index)


def edits_of(
    uid: PodUid,
    granted: tuple[GrantedShare, ...],
    plain: PlainSettings,
    edits: EditSettings,
    facts: HookFacts,
) -> ContainerEdits:
    """The edits of an answer: the GPUs, and with `memory_limits` also HAMi-core and its limits.

    Raises:
        SettingsError: no answer can be made with these settings.
    """
    if plain.memory_limits:
        request = EditRequest(uid, PLAIN, control_disabled=False, shares=granted)
        return container_edits(request, edits, facts)
    return gpu_edits(f"{uid}/{PLAIN}", granted, edits, facts)


def asked_again(ids: Iterable[SliceId], rows: Iterable[Row], epoch: KubeletEpoch) -> Row | None:
    """The row to answer again if the kubelet's checkpoint file does not name these ids, or None.

    The row has exactly these ids, was answered to an earlier kubelet instance and was never booked.
    If the file does not name the ids either, that kubelet ended before it stored the answer. It
    starts a container only after that, so no container uses the row's directory.

    A booked row is never used again: a container that restarts after a lost checkpoint cannot be
    told from a new one that got the ids of a running container.
    """
    wanted = frozenset(ids)
    fitting = [
        row
        for row in rows
        if row.decided_by is Decider.KUBELET
        and not row.confirmed
        and row.epoch != epoch
        and frozenset(row.slice_ids) == wanted
    ]
    return max(fitting, key=lambda row: row.answered_at, default=None)
