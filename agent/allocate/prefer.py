"""Chooses the slice ids that GetPreferredAllocation returns.

They are ids of the annotated GPUs, or else of GPUs close to each other. The search is greedy:
NVIDIA's plugin enumerates subsets and takes seconds for 3 of 16 GPUs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from agent.model import MAX_NUMBER, Gpu, GpuUuid, SliceId, closeness


def _gpu_of(text: SliceId) -> GpuUuid:
    """The GPU of an id, without a regex: the kubelet offers thousands of them.

    Each id of another form, of another plugin's list, is of a GPU of its own.
    """
    return GpuUuid(text.rpartition("-")[0] or text)


def _free(
    offered: Iterable[SliceId], chosen: Iterable[SliceId]
) -> defaultdict[GpuUuid, list[SliceId]]:
    """The ids on offer that are not chosen, by GPU."""
    free: defaultdict[GpuUuid, list[SliceId]] = defaultdict(list)
    for text in set(offered) - set(chosen):
        free[_gpu_of(text)].append(text)
    return free


def _in_order(ids: list[SliceId], held: frozenset[SliceId]) -> list[SliceId]:
    """The ids of one GPU: those that live rows hold come last."""

    def rank(text: SliceId) -> tuple[bool, int, str]:
        # Ids of another form come after all. No slice has a longer number, and Python refuses to
        # read one of thousands of digits.
        suffix = text.rpartition("-")[2]
        is_number = suffix.isdecimal() and len(suffix) <= len(str(MAX_NUMBER))
        return text in held, int(suffix) if is_number else MAX_NUMBER + 1, text

    return sorted(ids, key=rank)


def steer(
    available: Sequence[SliceId],
    must_include: Sequence[SliceId],
    wanted: Sequence[GpuUuid],
    held: frozenset[SliceId],
) -> tuple[SliceId, ...] | None:
    """One id for each entry of `wanted`, the must-include ids first; None if that is impossible.

    `wanted` names a GPU once for each slice of it.
    """
    chosen = list(dict.fromkeys(must_include))
    free, missing = _free(available, chosen), Counter(wanted)
    missing.subtract(map(_gpu_of, chosen))
    for uuid, count in missing.items():
        # Below 0: what must be included is more, or of other GPUs, than the annotation names.
        if not 0 <= count <= len(free[uuid]):
            return None
        chosen += _in_order(free[uuid], held)[:count]
    return tuple(chosen)


def nearest(
    available: Sequence[SliceId],
    must_include: Sequence[SliceId],
    size: int,
    gpus: Mapping[GpuUuid, Gpu],
    held: frozenset[SliceId],
) -> tuple[SliceId, ...]:
    """`size` ids on GPUs close to each other by a greedy search, on different GPUs if possible.

    The must-include ids come first. Empty: `size` is more than the ids offered or less than the
    must-include ids. Each id is read and sorted once, and at most g² pairs of GPUs are compared.
    """
    chosen = list(dict.fromkeys(must_include))
    free, uses = _free(available, chosen), Counter(map(_gpu_of, chosen))
    missing = size - len(chosen)
    if not 0 <= missing <= sum(map(len, free.values())):
        return ()

    near = Counter[GpuUuid]()

    def use(uuid: GpuUuid) -> None:
        for other in free.keys() & gpus.keys() if uuid in gpus else ():
            near[other] += closeness(gpus[uuid], gpus[other])

    def rank(uuid: GpuUuid) -> tuple[bool, int, int, int, int, str]:
        """Known GPUs first, then the least used, the closest, the emptiest, the lowest index."""
        index = gpus[uuid].index if uuid in gpus else 0
        return uuid not in gpus, uses[uuid], -near[uuid], -len(free[uuid]), index, uuid

    for uuid in uses:
        use(uuid)
    left, order = set(free), list[GpuUuid]()
    while left:
        order.append(min(left, key=rank))
        left.remove(order[-1])
        if order[-1] not in uses:
            use(order[-1])

    # One id of each GPU before a second one of any, and those of known GPUs before all others.
    ranked = sorted(
        (uuid not in gpus, uses[uuid] + number, place, text)
        for place, uuid in enumerate(order)
        for number, text in enumerate(_in_order(free[uuid], held)[:missing])
    )
    return (*chosen, *(text for *_, text in ranked[:missing]))
