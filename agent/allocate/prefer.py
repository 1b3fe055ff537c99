"""Chooses the slice ids that GetPreferredAllocation returns.

They are ids of the annotated GPUs, or else of GPUs close to each other. The search is greedy:
NVIDIA's plugin enumerates subsets and takes seconds for 3 of 16 GPUs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from agent.model import MAX_NUMBER, Gpu, GpuUuid, SliceId, closeness, split_slice_id

Offer = dict[GpuUuid, list[SliceId]]
"""The ids on offer, by GPU."""


def _by_gpu(offered: Iterable[SliceId]) -> Offer:
    """The ids by GPU, without a regex for each: the kubelet offers thousands of them."""
    by_gpu: defaultdict[str, list[SliceId]] = defaultdict(list)
    for text in dict.fromkeys(offered):
        by_gpu[text.rpartition("-")[0] or text].append(text)
    return {GpuUuid(uuid): by_gpu[uuid] for uuid in sorted(by_gpu)}


def _last_first(ids: list[SliceId], held: frozenset[SliceId]) -> None:
    """Sort the ids of a GPU so that pop() gives them in order: ids that live rows hold come last.

    It is done for the GPUs that are chosen alone, because most give none.
    """

    def number(text: SliceId) -> int:
        # Ids of another form, of another plugin's list, come after all. No slice has a longer
        # number, and Python refuses to read one of thousands of digits.
        suffix = text.rpartition("-")[2]
        is_number = suffix.isdecimal() and len(suffix) <= len(str(MAX_NUMBER))
        return int(suffix) if is_number else MAX_NUMBER + 1

    ids.sort(key=lambda text: (text in held, number(text)), reverse=True)


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
    missing = Counter(wanted)
    for text in chosen:
        pair = split_slice_id(text)
        if pair is None or not missing[pair[0]]:
            return None
        missing[pair[0]] -= 1
    kept = frozenset(chosen)
    heads = tuple(f"{uuid}-" for uuid, count in missing.items() if count)
    free = _by_gpu(text for text in available if text.startswith(heads) and text not in kept)
    for uuid, count in missing.items():
        ids = free.get(uuid, [])
        if count > len(ids):
            return None
        _last_first(ids, held)
        chosen += [ids.pop() for _ in range(count)]
    return tuple(chosen)


def nearest(
    available: Sequence[SliceId],
    must_include: Sequence[SliceId],
    size: int,
    gpus: Mapping[GpuUuid, Gpu],
    held: frozenset[SliceId],
) -> tuple[SliceId, ...]:
    """`size` ids on GPUs close to each other by a greedy search, on different GPUs if possible.

    The must-include ids come first. The result is empty if `size` is more than the ids offered or
    less than the must-include ids.

    For n ids on g GPUs: each id is read once and sorted at most once; g² pairs of GPUs are
    compared at most; GPUs are ranked at most g² + g + n times; each choice compares g ranks.
    """
    chosen = list(dict.fromkeys(must_include))
    kept = frozenset(chosen)
    if not len(chosen) <= size <= len(kept.union(available)):
        return ()
    free = _by_gpu(text for text in available if text not in kept)
    uses, near = Counter[GpuUuid](), Counter[GpuUuid]()
    is_sorted = set[GpuUuid]()

    def rank(uuid: GpuUuid) -> tuple[bool, int, int, int, int]:
        """Known GPUs first, then the least used, the closest, the emptiest, the lowest index."""
        gpu = gpus.get(uuid)
        index = gpu.index if gpu else 0
        return gpu is not None, -uses[uuid], near[uuid], len(free[uuid]), -index

    ranks = {uuid: rank(uuid) for uuid in free}

    def use(uuid: GpuUuid) -> None:
        """Rank anew what changes when an id of that GPU is chosen."""
        uses[uuid] += 1
        if uses[uuid] == 1 and uuid in gpus:
            for other in ranks.keys() & gpus.keys():
                near[other] += closeness(gpus[uuid], gpus[other])
                ranks[other] = rank(other)
        if uuid in ranks:
            ranks[uuid] = rank(uuid)

    for text in chosen:
        pair = split_slice_id(text)
        if pair is not None:
            use(pair[0])
    while len(chosen) < size:
        uuid = max(ranks, key=ranks.__getitem__)
        if uuid not in is_sorted:
            _last_first(free[uuid], held)
            is_sorted.add(uuid)
        chosen.append(free[uuid].pop())
        if not free[uuid]:
            del ranks[uuid]
        use(uuid)
    return tuple(chosen)
