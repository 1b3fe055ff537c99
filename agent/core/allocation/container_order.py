"""Pairs the groups of a pod's devices annotation with its containers."""

from collections.abc import Sequence

import msgspec

from agent.core.cluster.pods import ContainerView, Role
from agent.core.errors import Refusal, RefusalReason
from agent.core.inventory.share import Share


class Assignment(msgspec.Struct, frozen=True):
    """The group at position `group_index` of the annotation belongs to this container."""

    group_index: int
    container: str
    shares: tuple[Share, ...]


def pair_groups(
    groups: Sequence[tuple[Share, ...]], containers: Sequence[ContainerView]
) -> tuple[Assignment, ...]:
    """Pair the non-empty groups, in order, with the containers that request GPUs, in order.

    `containers` are all of the pod's, init containers first. Positions in the annotation do not
    matter, because schedulers up to and including 2.8 shift them. Those also write no groups for
    init containers; then the groups belong to the regular containers.

    Raises:
        Refusal: COUNT_MISMATCH, if the numbers of groups and containers differ, or the number of
            shares in a group and the number of slices that its container requests.
    """
    filled = [(index, group) for index, group in enumerate(groups) if group]
    asking = [container for container in containers if container.count > 0]
    regular = [container for container in asking if container.role is Role.APP]
    all_asking = len(filled) == len(asking)
    if not all_asking and (not regular or len(filled) != len(regular)):
        raise Refusal(
            RefusalReason.COUNT_MISMATCH,
            f"the scheduler wrote GPUs for {len(filled)} containers, but {len(asking)} containers "
            "of the pod request GPUs; delete the pod and create it again.",
        )
    paired = zip(filled, asking if all_asking else regular, strict=True)
    return tuple(_assigned(index, container, group) for (index, group), container in paired)


def _assigned(index: int, container: ContainerView, shares: tuple[Share, ...]) -> Assignment:
    if len(shares) != container.count:
        raise Refusal(
            RefusalReason.COUNT_MISMATCH,
            f"container {container.name} requests {container.count} GPUs, but the scheduler wrote "
            f"{len(shares)} for it; delete the pod and create it again.",
        )
    return Assignment(index, container.name, shares)
