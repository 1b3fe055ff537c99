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
from agent.errors import Refusal, RefusalReason
from agent.ledger import PLAIN, ContainerKey, Decider, GrantedShare, Row
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
    """The shares of the ids, one for each GPU, in PCI order. Raises Refusal.

    `held` ids are valid whatever the split count is now.
    """
    counts: Counter[GpuUuid] = Counter()
    for text in dict.fromkeys(ids):
        pair = split_slice_id(text)
        gpu = inventory.find(pair[0]) if pair else None
        named = f"The kubelet named {text[:80]!r}"
        if pair is None:
            to_do = "an operator has to check whether another plugin serves this resource."
            why = f"{named}, no id of a slice; {to_do}"
            raise Refusal(RefusalReason.UNKNOWN_SLICE, why)
        if gpu is None:
            why = f"{named}, and this node does not share that GPU; create the pod again."
            raise Refusal(RefusalReason.UNKNOWN_GPU, why)
        # After a lowered split count the kubelet still has the higher ids that containers hold.
        if pair[1] >= gpu.split_count and text not in held:
            why = f"{named}, but that GPU has only {gpu.split_count} slices; create the pod again."
            raise Refusal(RefusalReason.UNKNOWN_SLICE, why)
        require_serving(gpu, "The container")
        counts[gpu.uuid] += 1

    # A slice is an equal part of the registered memory, at least 1 MiB: 0 would mean all of it.
    return cuda_order(
        GrantedShare(Share(uuid, count * max(gpu.registered_mib // gpu.split_count, 1), 0), gpu)
        for uuid, count in counts.items()
        if (gpu := inventory.find(uuid))
    )


@dataclasses.dataclass(eq=False, kw_only=True)
class PlainAllocation(Allocation):
    """Each slice that the kubelet names is a part of its GPU; it does not say which pod asks."""

    chance: random.Random
    settings: PlainSettings

    @override
    async def decide(self, ids: tuple[SliceId, ...], call: AllocateCall) -> Row:
        """A row of its own for the ids."""
        # The kubelet crashes when the earlier of two overlapping calls is granted, so one that may
        # have been overtaken is refused too while another is under way.
        call.turn.yields = call.turn.may_be_stale
        call.turn.overlapped |= call.turn.may_be_stale
        facts = await self.on_disk(call, AllocateStep.HOOK, self.hooks.facts())
        call.step = AllocateStep.CHECK
        granted = grant(ids, self.inventory.value, self.held())
        # A UID without dashes is not one of the API server's. So hami mode, which removes
        # directories of deleted pods, does not remove this one.
        uid = PodUid(f"{self.chance.getrandbits(128):032x}")
        key, settings = ContainerKey(uid, PLAIN), self.edits.value
        has_limits = self.settings.memory_limits
        if has_limits:
            check_library(facts)
            edits = container_edits(key, granted, settings, facts)
        else:  # the container needs no library of HAMi-core's
            edits = gpu_edits(f"{uid}/{PLAIN}", granted, settings, facts)

        return Row(
            key=key,
            holder=None,
            shares=tuple(grant.share for grant in granted) if has_limits else (),
            slice_ids=tuple(sorted(set(ids))),
            edits=edits,
            answered_at=self.clock.now(),
            epoch=self.instance(),
            decided_by=Decider.KUBELET,
            resource=settings.resource,
        )

    @override
    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """`size` of the available ids, on GPUs near to each other; empty if that is impossible.

        Ids that were just offered come last: the kubelet marks them as used only at the Allocate.
        """
        turn, held, gpus = self.order.begin(), self.held(), self.gpus()
        offered = self.order.offered()
        fresh = tuple(slice_id for slice_id in available if slice_id not in offered)
        chosen = nearest(fresh, must_include, size, gpus, held)
        chosen = chosen or nearest(available, must_include, size, gpus, held)
        turn.ids = frozenset(chosen)
        return chosen
