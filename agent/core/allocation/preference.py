"""Which slice ids to offer the kubelet: the annotated GPUs', else the nearest free ones.

No subset is ever enumerated: NVIDIA's plugin does, and takes seconds for 3 of 16 GPUs.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from itertools import repeat

from agent.core.inventory.gpu import Gpu, GpuUuid
from agent.core.inventory.slices import MAX_NUMBER, SliceId, slice_id, split_slice_id
from agent.core.inventory.topology import closeness

_ALONE = -1
"""Stands for the number of an id that is no slice id: it is a GPU of its own."""

_Numbers = Mapping[GpuUuid, set[int]]
"""Ids by GPU, as numbers."""


def _by_gpu(ids: Collection[SliceId]) -> _Numbers:
    """Thousands are offered, in no order: each takes one short step here, and no regex."""
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for uuid, _, number in map(str.rpartition, ids, repeat("-")):
        texts[uuid].append(number)
    numbers: dict[GpuUuid, set[int]] = {}
    for uuid, found in texts.items():
        known = _read(found)
        if known is None or not uuid:
            return _one_by_one(ids)
        numbers[GpuUuid(uuid)] = known
    return numbers


def _read(texts: list[str]) -> set[int] | None:
    """The numbers of slices, or None: one of the texts is not written as they are."""
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
    """Ids of one GPU in the order in which they are given out: those that live rows hold last.

    They are put in order when the first one is taken: most GPUs give none.
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
    """One id of each GPU in `wanted`, the must-include ids first; None when they cannot be had.

    `wanted` names a GPU as often as slices of it are wanted; the answer has as many ids.
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
    """`size` ids on GPUs as near to each other as a greedy search finds, different GPUs first.

    Always `size` ids, the must-include ids first; none at all where `size` cannot be kept, for too
    few ids are offered or more must be included.

    Of n ids on g GPUs each is read once and sorted at most once; two are compared at most g² times;
    a GPU is ranked at most g² + g + n times; each id that is chosen costs one look at g ranks.
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
    """The free ids by GPU, and how well each of their GPUs suits beside the ones in use.

    Ranks are kept up as GPUs come into use, so that a choice compares them and computes none.
    """

    def __init__(self, gpus: Mapping[GpuUuid, Gpu], free: dict[GpuUuid, _Ids]) -> None:
        self.free = free
        self._gpus = gpus
        self._uses: dict[GpuUuid, int] = {}
        self._near = dict.fromkeys(self.free, 0)
        self._ranks = {uuid: self._rank(uuid) for uuid in self.free}

    def use(self, uuid: GpuUuid) -> None:
        """Take note that an id of that GPU is chosen."""
        self._uses[uuid] = self._uses.get(uuid, 0) + 1
        gpu = self._gpus.get(uuid)
        if gpu is not None and self._uses[uuid] == 1:
            for other in self._ranks.keys() & self._gpus.keys():
                self._near[other] += closeness(gpu, self._gpus[other])
                self._ranks[other] = self._rank(other)
        if uuid in self._ranks:
            self._ranks[uuid] = self._rank(uuid)

    def take(self) -> SliceId:
        """One id of the GPU that suits best."""
        uuid = max(self._ranks, key=self._ranks.__getitem__)
        ids = self.free[uuid]
        text = ids.give()
        if not ids:
            del self.free[uuid], self._ranks[uuid]
        self.use(uuid)
        return text

    def _rank(self, uuid: GpuUuid) -> tuple[bool, int, int, int, int]:
        """Known GPUs, then the least used, the nearest, the emptiest, the lowest index."""
        gpu = self._gpus.get(uuid)
        index = gpu.index if gpu else 0
        uses = self._uses.get(uuid, 0)
        return gpu is not None, -uses, self._near[uuid], len(self.free[uuid]), -index
