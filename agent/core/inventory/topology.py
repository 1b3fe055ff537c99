"""How well two GPUs are joined, in HAMi's points: the one rule for the scheduler and for ourselves.

Source: HAMi v2.10 pkg/device/nvidia/calculate_score.go.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from agent.core.inventory.gpu import Gpu, GpuUuid, Link

NVLINK_POINTS: Final = 100
MOST_NVLINKS: Final = 18
"""More of them between two GPUs bring no more points."""

Scores = Mapping[GpuUuid, Mapping[GpuUuid, int]]
"""Points by GPU and by the other GPU of the pair."""


def pair_scores(gpus: Iterable[Gpu]) -> Scores:
    """The points of every pair, in the order of the GPUs; each has an entry, even alone."""
    known = tuple(gpus)
    return {
        one.uuid: {other.uuid: pair_points(one, other) for other in known if other.uuid != one.uuid}
        for one in known
    }


def pair_points(one: Gpu, other: Gpu) -> int:
    """The points of one pair; none where its two sides tell of different kinds of links."""
    there = _link(one, other)
    if there is None or _kinds(there) != _kinds(_link(other, one)):
        return 0
    return (there.path or 0) + NVLINK_POINTS * min(there.nvlinks, MOST_NVLINKS)


def closeness(one: Gpu, other: Gpu) -> int:
    """How near two GPUs are, for whoever chooses among them: their points, then one NUMA node."""
    same_node = one.numa is not None and one.numa == other.numa
    return 2 * pair_points(one, other) + same_node


def lopsided(gpus: Iterable[Gpu]) -> tuple[tuple[GpuUuid, GpuUuid], ...]:
    """The pairs whose two sides tell of different kinds of links: a sign of a broken one."""
    known = tuple(gpus)
    return tuple(
        (one.uuid, other.uuid)
        for place, one in enumerate(known)
        for other in known[place + 1 :]
        if _kinds(_link(one, other)) != _kinds(_link(other, one))
    )


def _link(one: Gpu, other: Gpu) -> Link | None:
    return next((link for link in one.links if link.peer == other.uuid), None)


def _kinds(link: Link | None) -> int:
    """How many kinds of links there are: over PCI, and by NVLink."""
    return 0 if link is None else (link.path is not None) + (link.nvlinks > 0)
