"""Which group of a pod's devices text belongs to which of its containers."""

import dataclasses
from collections.abc import Sequence

from agent.core.cluster.pods import ContainerView, Role
from agent.core.errors import Refusal, RefusalReason
from agent.core.inventory.share import Share


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """The group at position `group_index` of the text is for the container of that name."""

    group_index: int
    container: str
    shares: tuple[Share, ...]


def pair_groups(
    groups: Sequence[tuple[Share, ...]], containers: Sequence[ContainerView]
) -> tuple[Assignment, ...]:
    """The non-empty groups with the containers that ask for GPUs, both in their order.

    `containers` are the pod's, init containers first; one that asks for none is passed over.
    Positions in the text decide nothing: schedulers up to 2.8 shift them. Those write no groups for
    init containers either: then the groups are the regular containers'.

    Raises:
        Refusal: COUNT_MISMATCH, the groups are not as many as the containers, or a group does
            not have as many shares as its container asks for.
    """
    filled = [(index, group) for index, group in enumerate(groups) if group]
    asking = [container for container in containers if container.count > 0]
    regular = [container for container in asking if container.role is Role.APP]
    all_asking = len(filled) == len(asking)
    if not all_asking and (not regular or len(filled) != len(regular)):
        raise Refusal(
            RefusalReason.COUNT_MISMATCH,
            f"the scheduler wrote GPUs for {len(filled)} containers, but {len(asking)} containers "
            "of it ask for GPUs; delete the pod and create it again.",
        )
    paired = zip(filled, asking if all_asking else regular, strict=True)
    return tuple(_assigned(index, container, group) for (index, group), container in paired)


def _assigned(index: int, container: ContainerView, shares: tuple[Share, ...]) -> Assignment:
    if len(shares) != container.count:
        raise Refusal(
            RefusalReason.COUNT_MISMATCH,
            f"container {container.name} asks for {container.count} GPUs, but the scheduler wrote "
            f"{len(shares)} for it; delete the pod and create it again.",
        )
    return Assignment(index, container.name, shares)
