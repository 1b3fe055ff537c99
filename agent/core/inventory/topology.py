"""Scores how closely two GPUs are connected, in HAMi's points.

The score annotation and the agent's preference use the same points.
Source: HAMi v2.10 pkg/device/nvidia/calculate_score.go.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Final

from agent.core.inventory.gpu import Gpu, GpuUuid, Link

NVLINK_POINTS: Final = 100
MOST_NVLINKS: Final = 18
"""NVLinks beyond this number between two GPUs bring no points."""

Scores = Mapping[GpuUuid, Mapping[GpuUuid, int]]
"""Points by the two GPUs of a pair."""


def pair_scores(gpus: Iterable[Gpu]) -> Scores:
    """The points of every pair, in the order of the GPUs. A single GPU has an empty entry."""
    known = tuple(gpus)
    return {
        gpu.uuid: {peer.uuid: pair_points(gpu, peer) for peer in known if peer.uuid != gpu.uuid}
        for gpu in known
    }


def pair_points(gpu: Gpu, peer: Gpu) -> int:
    """The points of one pair; 0 if the two GPUs report different kinds of links."""
    link = _link(gpu, peer)
    if link is None or _kinds(link) != _kinds(_link(peer, gpu)):
        return 0
    return (link.path or 0) + NVLINK_POINTS * min(link.nvlinks, MOST_NVLINKS)


def closeness(gpu: Gpu, peer: Gpu) -> int:
    """A rank for choosing GPUs: by points, and for equal points by a common NUMA node."""
    same_node = gpu.numa is not None and gpu.numa == peer.numa
    return 2 * pair_points(gpu, peer) + same_node


def lopsided(gpus: Iterable[Gpu]) -> tuple[tuple[GpuUuid, GpuUuid], ...]:
    """The pairs whose two GPUs report different kinds of links: a sign of a broken link."""
    return tuple(
        (gpu.uuid, peer.uuid)
        for gpu, peer in itertools.combinations(gpus, 2)
        if _kinds(_link(gpu, peer)) != _kinds(_link(peer, gpu))
    )


def _link(gpu: Gpu, peer: Gpu) -> Link | None:
    return next((link for link in gpu.links if link.peer == peer.uuid), None)


def _kinds(link: Link | None) -> int:
    """The number of kinds of links: PCI and NVLink."""
    return 0 if link is None else (link.path is not None) + (link.nvlinks > 0)
