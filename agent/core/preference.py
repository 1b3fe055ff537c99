"""Which slice ids to offer the kubelet: the annotated GPUs', else the nearest free ones.

No subset is ever enumerated: NVIDIA's plugin does, and takes seconds for 3 of 16 GPUs.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from agent.core.gpu import Gpu, GpuUuid
from agent.core.slices import SliceId, split_slice_id

_NVLINK_POINTS = 100
"""Points for one NVLink between two GPUs, in HAMi's scale for the pair."""


def _by_gpu(available: Iterable[SliceId], held: frozenset[SliceId]) -> dict[GpuUuid, list[SliceId]]:
    """Offered ids by GPU, ids that live rows hold last, else in number order.

    An id that is no slice id is a GPU of its own.
    """
    numbered: dict[GpuUuid, list[tuple[bool, int, SliceId]]] = {}
    for text in set(available):
        uuid, number = split_slice_id(text) or (GpuUuid(text), 0)
        numbered.setdefault(uuid, []).append((text in held, number, text))
    return {uuid: [one[2] for one in sorted(numbered[uuid])] for uuid in sorted(numbered)}


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
    groups = _by_gpu((text for text in available if text not in kept), held)
    for uuid, count in missing.items():
        free = groups.get(uuid, [])[:count]
        if len(free) < count:
            return None
        chosen += free
    return tuple(chosen)


def _closeness(one: Gpu, other: Gpu) -> int:
    """How near two GPUs are: NVLinks and PCI path by HAMi's points, then the same NUMA node."""
    points = sum(
        link.nvlinks * _NVLINK_POINTS + (link.path or 0)
        for link in one.links
        if link.peer == other.uuid
    )
    same_node = one.numa is not None and one.numa == other.numa
    return 2 * points + same_node


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

    Of n ids on g GPUs each is read once and sorted once; two GPUs are compared at most g² times;
    a GPU is ranked at most g² + g + n times; each id that is chosen costs one look at g ranks.
    """
    chosen = list(dict.fromkeys(must_include))
    kept = frozenset(chosen)
    if not len(chosen) <= size <= len(kept.union(available)):
        return ()
    field = _Field(gpus, _by_gpu((text for text in available if text not in kept), held))
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

    def __init__(
        self, gpus: Mapping[GpuUuid, Gpu], groups: Mapping[GpuUuid, list[SliceId]]
    ) -> None:
        self.free = {uuid: deque(ids) for uuid, ids in groups.items()}
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
                self._near[other] += _closeness(gpu, self._gpus[other])
                self._ranks[other] = self._rank(other)
        if uuid in self._ranks:
            self._ranks[uuid] = self._rank(uuid)

    def take(self) -> SliceId:
        """One id of the GPU that suits best."""
        uuid = max(self._ranks, key=self._ranks.__getitem__)
        ids = self.free[uuid]
        text = ids.popleft()
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
