"""Chooses the slice ids that GetPreferredAllocation returns.

They are ids of the annotated GPUs, or else of GPUs close to each other. The search is greedy:
NVIDIA's plugin enumerates subsets and takes seconds for 3 of 16 GPUs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from agent.model import MAX_NUMBER, Gpu, GpuUuid, SliceId, closeness, split_slice_id


class _Ids:
    """The ids of one GPU in the order in which they are chosen: ids held by live rows come last.

    They are sorted when the first one is taken, because most GPUs give none.
    """

    def __init__(self) -> None:
        self.texts: list[SliceId] = []
        self._is_sorted = False

    def give(self, held: frozenset[SliceId]) -> SliceId:
        if not self._is_sorted:
            self.texts.sort(key=lambda text: (text in held, _number(text)), reverse=True)
            self._is_sorted = True
        return self.texts.pop()


def _number(text: SliceId) -> int:
    """The number of a slice. Ids of another form, of another plugin's list, come after all."""
    suffix = text.rpartition("-")[2]
    # No slice has a longer number, and Python refuses to read one of thousands of digits.
    is_number = suffix.isdecimal() and len(suffix) <= len(str(MAX_NUMBER))
    return int(suffix) if is_number else MAX_NUMBER + 1


def _by_gpu(offered: Iterable[SliceId]) -> dict[GpuUuid, _Ids]:
    """The ids by GPU, without a regex for each: the kubelet offers thousands of them."""
    by_gpu: dict[str, _Ids] = {}
    for text in dict.fromkeys(offered):
        uuid = text.rpartition("-")[0] or text
        if uuid not in by_gpu:
            by_gpu[uuid] = _Ids()
        by_gpu[uuid].texts.append(text)
    return {GpuUuid(uuid): by_gpu[uuid] for uuid in sorted(by_gpu)}


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
    offered = [text for text in available if text.startswith(heads) and text not in kept]
    free = _by_gpu(offered)
    for uuid, count in missing.items():
        ids = free.get(uuid, _Ids())
        if count > len(ids.texts):
            return None
        chosen += [ids.give(held) for _ in range(count)]
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
    offered = [text for text in available if text not in kept]
    field = _Field(gpus, _by_gpu(offered), held)
    for text in chosen:
        pair = split_slice_id(text)
        if pair is not None:
            field.use(pair[0])
    while len(chosen) < size:
        chosen.append(field.take())
    return tuple(chosen)


class _Field:
    """The free ids by GPU, and the rank of each GPU beside the GPUs already chosen.

    Ranks are updated when a GPU is chosen, so that a choice only compares them.
    """

    def __init__(
        self,
        gpus: Mapping[GpuUuid, Gpu],
        free: dict[GpuUuid, _Ids],
        held: frozenset[SliceId],
    ) -> None:
        self.free = free
        self._held = held
        self._gpus = gpus
        self._uses: dict[GpuUuid, int] = {}
        self._near = dict.fromkeys(self.free, 0)
        self._ranks = {uuid: self._rank(uuid) for uuid in self.free}

    def use(self, uuid: GpuUuid) -> None:
        """Note that an id of that GPU is chosen."""
        self._uses[uuid] = self._uses.get(uuid, 0) + 1
        gpu = self._gpus.get(uuid)
        if gpu is not None and self._uses[uuid] == 1:
            for other in self._ranks.keys() & self._gpus.keys():
                self._near[other] += closeness(gpu, self._gpus[other])
                self._ranks[other] = self._rank(other)
        if uuid in self._ranks:
            self._ranks[uuid] = self._rank(uuid)

    def take(self) -> SliceId:
        """Choose one id of the GPU with the highest rank."""
        uuid = max(self._ranks, key=self._ranks.__getitem__)
        ids = self.free[uuid]
        text = ids.give(self._held)
        if not ids.texts:
            del self.free[uuid], self._ranks[uuid]
        self.use(uuid)
        return text

    def _rank(self, uuid: GpuUuid) -> tuple[bool, int, int, int, int]:
        """Known GPUs first, then the least used, the closest, the emptiest, the lowest index."""
        gpu = self._gpus.get(uuid)
        index = gpu.index if gpu else 0
        uses = self._uses.get(uuid, 0)
        return gpu is not None, -uses, self._near[uuid], len(self.free[uuid].texts), -index
