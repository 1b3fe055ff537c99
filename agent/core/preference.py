"""Which slice ids to offer the kubelet: the annotated GPUs', else the nearest free ones.

Every choice is linear in the ids offered, but for the search of near GPUs, which is at most
GPUs squared: no subset is ever enumerated.
"""

from collections.abc import Iterable, Mapping, Sequence

from agent.core.gpu import Gpu, GpuUuid
from agent.core.slices import SliceId, split_slice_id

_NVLINK_POINTS = 100
"""Points for one NVLink between two GPUs, in HAMi's scale for the pair."""


def _order(text: SliceId) -> tuple[str, int]:
    """Sort key: GPU, then slice number; foreign ids last by their text."""
    pair = split_slice_id(text)
    return (pair[0], pair[1]) if pair else (text, -1)


def _by_gpu(available: Iterable[SliceId], held: frozenset[SliceId]) -> dict[GpuUuid, list[SliceId]]:
    """Offered ids by GPU, ids that live rows hold last, else in number order."""
    groups: dict[GpuUuid, list[SliceId]] = {}
    for text in sorted(set(available), key=lambda one: (one in held, _order(one))):
        pair = split_slice_id(text)
        groups.setdefault(pair[0] if pair else GpuUuid(text), []).append(text)
    return groups


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
    missing = list(wanted)
    for text in chosen:
        pair = split_slice_id(text)
        if pair is None or pair[0] not in missing:
            return None
        missing.remove(pair[0])
    groups = _by_gpu((text for text in available if text not in chosen), held)
    for uuid in missing:
        free = groups.get(uuid)
        if not free:
            return None
        chosen.append(free.pop(0))
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

    Always `size` ids when so many are offered, else all of them; must-include ids always first.
    """
    chosen = list(dict.fromkeys(must_include))[:size]
    groups = _by_gpu((text for text in available if text not in chosen), held)
    used = [gpus[pair[0]] for t in chosen if (pair := split_slice_id(t)) and pair[0] in gpus]
    while len(chosen) < size and groups:
        fresh = [uuid for uuid in groups if uuid not in {gpu.uuid for gpu in used}]
        uuid = max(fresh or groups, key=lambda one: _rank(one, used, gpus, groups))
        chosen.append(groups[uuid].pop(0))
        if uuid in gpus:
            used.append(gpus[uuid])
        if not groups[uuid]:
            del groups[uuid]
    return tuple(chosen)


def _rank(
    uuid: GpuUuid,
    used: Sequence[Gpu],
    gpus: Mapping[GpuUuid, Gpu],
    groups: Mapping[GpuUuid, list[SliceId]],
) -> tuple[int, int, int]:
    """Nearness to the GPUs chosen so far, then free slices, then the lower index."""
    gpu = gpus.get(uuid)
    if gpu is None:
        return -1, 0, 0
    near = sum(_closeness(gpu, other) for other in used)
    return near, len(groups[uuid]), -gpu.index
