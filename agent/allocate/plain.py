"""Plain mode: the kubelet's ids decide what a container gets.

Each answer gets its own row, because the kubelet can name ids again while a container holds them:
after a lost checkpoint, or after a List during an Allocate. So no answer is given again.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
from typing_extensions import override

from agent.allocate.edits import check_library, container_edits, cuda_order, gpu_edits
from agent.allocate.prefer import nearest
from agent.allocate.room import require_serving
from agent.allocate.service import AllocateCall, AllocateStep, Allocation
from agent.cluster import PodUid
from agent.errors import Refusal, RefusalReason, cap
from agent.ledger import (
    PLAIN,
    ContainerEdits,
    ContainerKey,
    Decider,
    EditSettings,
    GrantedShare,
    HookFacts,
    Row,
)
from agent.model import GpuUuid, Inventory, Share, SliceId, split_slice_id
from agent.setting import Field, boolean


class PlainSettings(msgspec.Struct, frozen=True):
    """Settings without HAMi's scheduler."""

    # fmt: off
    memory_limits: Annotated[bool, Field("plain.memoryLimits", boolean,
        "With scheduler none: HAMi-core limits each slice to an equal part of its GPU's "
        "memory.")] = False
    # fmt: on


def grant(
    ids: Sequence[SliceId], inventory: Inventory, held: Collection[SliceId]
) -> tuple[GrantedShare, ...]:
    """The shares of the ids, one for each GPU, in PCI order.

    `held` ids are valid whatever the split count is now.

    Raises:
        Refusal: the request is malformed, or names a slice or GPU that cannot be given.
    """
    counts: Counter[GpuUuid] = Counter()
    for text in dict.fromkeys(ids):
        pair = split_slice_id(text)
        if pair is None:
            raise Refusal(
                RefusalReason.UNKNOWN_SLICE,
                f"The kubelet named {cap(text, 80)!r}, which is not the id of a slice; ask the "
                "operator whether another plugin serves this resource.",
            )
        gpu = inventory.find(pair[0])
        if gpu is None:
            raise Refusal(
                RefusalReason.UNKNOWN_GPU,
                f"The kubelet named GPU {cap(pair[0], 64)}, which this node does not share; create "
                "the pod again.",
            )
        if pair[1] >= gpu.split_count and text not in held:
            raise Refusal(
                RefusalReason.UNKNOWN_SLICE,
                f"The kubelet named slice {cap(text, 80)}, but GPU {gpu.gpu.label} has only "
                f"{gpu.split_count} slices; create the pod again.",
            )
        require_serving(gpu, "The container")
        counts[gpu.uuid] += 1

    # A slice is an equal part of the registered memory, at least 1 MiB: 0 would mean all of it.
    return cuda_order(
        GrantedShare(Share(uuid, count * max(gpu.registered_mib // gpu.split_count, 1), 0), gpu)
        for uuid, count in counts.items()
        if (gpu := inventory.find(uuid))
    )


def edits_of(
    uid: PodUid,
    granted: tuple[GrantedShare, ...],
    plain: PlainSettings,
    edits: EditSettings,
    facts: HookFacts,
) -> ContainerEdits:
    """The edits of an answer: the GPUs, and with `memory_limits` also HAMi-core and its limits."""
    if plain.memory_limits:
        return container_edits(ContainerKey(uid, PLAIN), granted, edits, facts)

    return gpu_edits(f"{uid}/{PLAIN}", granted, edits, facts)


@dataclasses.dataclass(eq=False, kw_only=True)
class PlainAllocation(Allocation):
    """Each slice that the kubelet names is a part of its GPU. `edits` has the resource name too.

    The agent does not know which pod asks. It does not ask PodResources, which cannot tell a new
    pod from an old one. The kubelet crashes when the earlier of two overlapping calls is granted.
    """

    chance: random.Random
    settings: PlainSettings

    @override
    async def decide(self, ids: tuple[SliceId, ...], call: AllocateCall) -> Row:
        """A row of its own for the ids."""
        # A call that may have been overtaken is refused too while another is under way.
        call.turn.yields = call.turn.may_be_stale
        call.turn.overlapped |= call.turn.may_be_stale
        facts = await self.on_disk(call, AllocateStep.HOOK, self.hooks.facts())
        call.step = AllocateStep.CHECK
        granted = grant(ids, self.inventory.value, self.held())
        # A UID without dashes is not one of the API server's. So hami mode, which removes
        # directories of deleted pods, does not remove this one.
        uid = PodUid(f"{self.chance.getrandbits(128):032x}")
        edits, has_limits = self.edits.value, self.settings.memory_limits
        if has_limits:
            # Without limits the container needs no library of HAMi-core's.
            check_library(facts)

        return Row(
            key=ContainerKey(uid, PLAIN),
            holder=None,
            shares=tuple(grant.share for grant in granted) if has_limits else (),
            slice_ids=tuple(sorted(set(ids))),
            edits=edits_of(uid, granted, self.settings, edits, facts),
            answered_at=self.clock.now(),
            epoch=self.instance(),
            decided_by=Decider.KUBELET,
            resource=edits.resource,
        )

    @override
    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """`size` of the available ids, on GPUs near to each other; empty if that is impossible.

        Ids that were just offered to another container come last, because the kubelet marks them as
        used only at the Allocate.
        """
        turn, held = self.order.begin(), self.held()
        gpus = {shared.uuid: shared.gpu for shared in self.inventory.value.gpus}
        offered = self.order.offered()
        fresh = tuple(slice_id for slice_id in available if slice_id not in offered)
        chosen = nearest(fresh, must_include, size, gpus, held)
        chosen = chosen or nearest(available, must_include, size, gpus, held)
        turn.ids = frozenset(chosen)

        return chosen
