"""Chooses the slice ids that GetPreferredAllocation returns.

They are ids of the annotated GPUs, or else of GPUs close to each other. The search is greedy:
NVIDIA's plugin enumerates subsets and takes seconds for 3 of 16 GPUs.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from itertools import repeat

from agent.model import MAX_NUMBER, Gpu, GpuUuid, SliceId, closeness, slice_id, split_slice_id

_ALONE = -1
"""The number of an id that is not a slice id; such an id counts as a GPU of its own."""

_Numbers = Mapping[GpuUuid, set[int]]
"""The slice numbers by GPU."""


def _by_gpu(ids: Collection[SliceId]) -> _Numbers:
    """Group ids by GPU. It avoids a regex per id, because the kubelet offers thousands of them."""
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for uuid, _, number in map(str.rpartition, ids, repeat("-")):
        texts[uuid].append(number)
    by_gpu: dict[GpuUuid, set[int]] = {}
    for uuid, suffixes in texts.items():
        numbers = _read(suffixes)
        if numbers is None or not uuid:
            return _one_by_one(ids)
        by_gpu[GpuUuid(uuid)] = numbers
    return by_gpu


def _read(texts: list[str]) -> set[int] | None:
    """The slice numbers, or None if one of the texts is not a canonical slice number."""
    try:
        numbers = [*map(int, texts)]
    except ValueError:
        return None
    return set(numbers) if [*map(str, numbers)] == texts and max(numbers) <= MAX_NUMBER else None


def _one_by_one(ids: Collection[SliceId]) -> _Numbers:
    numbers: defaultdict[GpuUuid, set[int]] = defaultdict(set)
    for text in ids:
        uuid, number = split_slice_id(text) or (GpuUuid(text), _ALONE)
        numbers[uuid].add(number)
    return numbers


class _Ids:
    """The ids of one GPU in the order in which they are chosen: ids held by live rows come last.

    They are sorted when the first one is taken, because most GPUs give none.
    """

    def __init__(self, uuid: GpuUuid, numbers: set[int], held: set[int]) -> None:
        self._uuid = uuid
        self._numbers = numbers
        self._held = held
        self._ordered: deque[int] | None = None

    def __len__(self) -> int:
        return len(self._numbers if self._ordered is None else self._ordered)

    def give(self) -> SliceId:
        if self._ordered is None:
            free, held = self._numbers - self._held, self._numbers & self._held
            self._ordered = deque((*sorted(free), *sorted(held)))
        number = self._ordered.popleft()
        return SliceId(self._uuid) if number == _ALONE else slice_id(self._uuid, number)


def _free(offered: Collection[SliceId], held: frozenset[SliceId]) -> dict[GpuUuid, _Ids]:
    """The offered ids by GPU."""
    numbers, taken = _by_gpu(offered), _by_gpu(held)
    return {uuid: _Ids(uuid, numbers[uuid], taken.get(uuid, set())) for uuid in sorted(numbers)}


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
    free = _free(offered, held)
    for uuid, count in missing.items():
        if count > len(free.get(uuid, ())):
            return None
        chosen += [free[uuid].give() for _ in range(count)]
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
    field = _Field(gpus, _free(offered, held))
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

    def __init__(self, gpus: Mapping[GpuUuid, Gpu], free: dict[GpuUuid, _Ids]) -> None:
        self.free = free
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
        text = ids.give()
        if not ids:
            del self.free[uuid], self._ranks[uuid]
        self.use(uuid)
        return text

    def _rank(self, uuid: GpuUuid) -> tuple[bool, int, int, int, int]:
        """Known GPUs first, then the least used, the closest, the emptiest, the lowest index."""
        gpu = self._gpus.get(uuid)
        index = gpu.index if gpu else 0
        uses = self._uses.get(uuid, 0)
        return gpu is not None, -uses, self._near[uuid], len(self.free[uuid]), -index
