"""Decides whether an operator may change the limits of a running container, and applies them.

A row keeps its live limits; its answer stays byte for byte as it was. So HAMi-core's region is
compared with the row in each round, and written where it differs: after a restart of container or
agent, after a failed write, or if another process of the container created the region first.
"""

import difflib
from collections.abc import Iterable, Mapping

import msgspec

from agent.core.allocation.room import RoomClaim, claim_of, counts, gpu_use, scheduled
from agent.core.cluster.pods import PodUid, PodView, Role
from agent.core.containers.container_edits import PRELOAD_FILE
from agent.core.errors import AgentError, cap
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory, SharedGpu
from agent.core.inventory.share import Share
from agent.core.inventory.slices import MIB
from agent.core.state.ledger import Decider, Ledger, Row
from agent.core.usage.region import MAX_GPUS, RegionChange, RegionReading, RegionState
from agent.core.usage.use import ContainerUse

FREE_CORES = 100
"""What HAMi-core has in `sm_limit` for a container without a limit."""


class LimitWish(msgspec.Struct, frozen=True):
    """What an operator asks for. An empty name means the only one there is.

    - `gpu`: index or UUID; empty: each GPU of the container.
    - `memory_mib`, `core_percent`: None: as it is. `reset`: both as they were answered.
    """

    pod: str
    namespace: str = ""
    container: str = ""
    gpu: str = ""
    memory_mib: int | None = None
    core_percent: int | None = None
    reset: bool = False


class LimitRefused(AgentError):  # noqa: N818 -- an answer, not a fault
    """A wish is refused; str() says why, and what to do. `unknown`: it names nothing here."""

    def __init__(self, text: str, *, unknown: bool = False) -> None:
        super().__init__(text)
        self.unknown = unknown


class LimitFacts(msgspec.Struct, frozen=True):
    """What a decision reads. `ledger`: with the rows that are being written."""

    ledger: Ledger
    inventory: Inventory
    pods: Mapping[PodUid, PodView]


def find_row(wish: LimitWish, facts: LimitFacts) -> Row:
    """The row of the container that the wish names. Raises LimitRefused.

    It is also refused if the container can have no other limits at all.
    """
    rows = [row for row in facts.ledger.rows if row.holder is not None and _is_there(row, facts)]
    named = [row for row in rows if wish.namespace in {"", row.namespace}]
    fitting = [row for row in named if row.pod == wish.pod]
    pods = sorted({_pod(row) for row in fitting})
    if not pods:
        _refuse_ended(wish, facts)
        close = difflib.get_close_matches(wish.pod, sorted({row.pod for row in named}), n=1)
        hint = f"did you mean {close[0]}?" if close else "`hami-agent status` lists those that do."
        text = f"No pod {cap(wish.pod)} holds a GPU of this node; {hint}"
        raise LimitRefused(text, unknown=True)
    if len(pods) > 1:
        raise LimitRefused(f"There are several pods of that name; name one of {', '.join(pods)}.")
    containers = ", ".join(sorted(map(_container, fitting)))
    chosen = [row for row in fitting if wish.container in {"", _container(row)}]
    if not chosen:
        raise LimitRefused(
            f"No container {cap(wish.container)} of pod {pods[0]} holds a GPU; these do: "
            f"{containers}.",
            unknown=True,
        )
    if len(chosen) > 1:
        raise LimitRefused(
            f"Pod {pods[0]} has several containers with GPUs; name one with --container: "
            f"{containers}."
        )
    row = chosen[0]
    obstacle = _obstacle(row, wish)
    if obstacle:
        raise LimitRefused(f"Container {_container(row)} of pod {pods[0]} {obstacle}.")
    return row


def _refuse_ended(wish: LimitWish, facts: LimitFacts) -> None:
    """Refuse a wish about a pod that has rows and is not known to run. Raises LimitRefused."""
    for row in facts.ledger.rows:
        if row.pod == wish.pod and wish.namespace in {"", row.namespace}:
            raise LimitRefused(
                f"Pod {_pod(row)} has ended, or the agent has not read it from the API server "
                "since its start; try again in a few seconds."
            )


def busy(row: Row) -> LimitRefused:
    """The refusal while the row is being answered or closed."""
    return LimitRefused(
        f"Container {_container(row)} of pod {_pod(row)} is being answered again or has ended; try "
        "again in a few seconds."
    )


def limited(row: Row, use: ContainerUse, wish: LimitWish, facts: LimitFacts) -> Row:
    """The row of `find_row` with its new live limits; the same row: nothing changes.

    Lowering below what is in use is refused: HAMi-core would then fail each allocation. `use`: of
    the container now. Raises LimitRefused.
    """
    chosen = _chosen(row, wish, facts.inventory)
    limits = tuple(
        _wished(share, row.shares[place], wish) if share.uuid in chosen else share
        for place, share in enumerate(row.limits)
    )
    if limits == row.limits:
        return row
    changed = msgspec.structs.replace(row, live_limits=limits)
    text = (
        _unreached(use, wish)
        or _too_low(row, changed, use, facts.inventory)
        or _too_high(row, changed, facts)
    )
    if text:
        raise LimitRefused(text)
    return changed


def answered_mib(row: Row, place: int) -> int | None:
    """The memory limit in MiB that the answer gives HAMi-core; None: it gives none.

    Of a share of all memory it is what was registered at that time.
    """
    text = dict(row.edits.envs).get(f"CUDA_DEVICE_MEMORY_LIMIT_{place}", "")
    return int(text.removesuffix("m")) if text else None


def wanted_change(row: Row, reading: RegionReading) -> RegionChange | None:
    """What to write into the container's region, so that it has the row's live limits.

    None: nothing. A GPU that the region does not list yet is written all the same.
    """
    if not row.live_limits or reading.region is None:
        return None
    memory: list[tuple[int, int]] = []
    cores: list[tuple[int, int]] = []
    for place, share in enumerate(row.live_limits[:MAX_GPUS]):
        gpu = next((one for one in reading.region.gpus if one.index == place), None)
        limit = _mib(row, place) * MIB
        percent = share.core_percent or FREE_CORES
        if gpu is None or gpu.memory_limit != limit:
            memory.append((place, limit))
        if gpu is None or min(gpu.core_limit, FREE_CORES) != percent:
            cores.append((place, percent))
    if not memory and not cores:
        return None
    return RegionChange(memory_limits=tuple(memory), core_limits=tuple(cores))


def _is_there(row: Row, facts: LimitFacts) -> bool:
    """Whether the row's pod has not ended; in plain mode that is not known."""
    if row.decided_by is Decider.KUBELET:
        return True
    pod = facts.pods.get(row.key.pod_uid)
    return pod is not None and not pod.terminal


def _container(row: Row) -> str:
    return row.holder.container if row.holder else row.key.container


def _pod(row: Row) -> str:
    return f"{row.namespace}/{row.pod}"


def _obstacle(row: Row, wish: LimitWish) -> str:
    """Why limits of this container cannot be changed at all; the predicate of a sentence."""
    envs = dict(row.edits.envs)
    mounts = {mount.container_path for mount in row.edits.mounts}
    is_free = envs.get("GPU_CORE_UTILIZATION_POLICY") == "disable"
    rules = (
        (row.adopted, "was answered by another plugin; create the pod again"),
        (
            answered_mib(row, 0) is None,
            "was given its GPUs without limits; in plain mode set plain.memoryLimits for new pods",
        ),
        (
            PRELOAD_FILE not in mounts,
            "switched HAMi-core off; create the pod without CUDA_DISABLE_CONTROL",
        ),
        (
            row.role is Role.INIT,
            "is an init container; wait for its end and limit the app container",
        ),
        (
            len({share.uuid for share in row.shares}) < len(row.shares),
            "has one GPU twice, for which HAMi-core keeps one limit; create the pod with it once",
        ),
        (
            is_free and wish.core_percent is not None,
            "was answered with core limits disabled; leave out --cores",
        ),
    )
    return next((text for is_so, text in rules if is_so), "")


def _chosen(row: Row, wish: LimitWish, inventory: Inventory) -> frozenset[GpuUuid]:
    """The GPUs of the container that the wish means. Raises LimitRefused."""
    held = frozenset(share.uuid for share in row.shares)
    if not wish.gpu:
        return held
    index = {gpu.gpu.label: gpu.uuid for gpu in inventory.gpus}
    uuid = index.get(wish.gpu, GpuUuid(wish.gpu))
    if uuid not in held:
        labels = ", ".join(inventory.label(share.uuid) for share in row.shares)
        raise LimitRefused(
            f"Container {_container(row)} of pod {_pod(row)} does not hold GPU "
            f"{cap(wish.gpu, 64)}; it holds {labels}.",
            unknown=True,
        )
    return frozenset({uuid})


def _wished(share: Share, answered: Share, wish: LimitWish) -> Share:
    if wish.reset:
        return answered
    return Share(
        share.uuid,
        share.memory_mib if wish.memory_mib is None else wish.memory_mib,
        share.core_percent if wish.core_percent is None else wish.core_percent,
    )


def _unreached(use: ContainerUse, wish: LimitWish) -> str:
    """Why a limit could not be applied; empty: it can. A reset needs no region."""
    if wish.reset or use.state is RegionState.READABLE:
        return ""
    if use.state is RegionState.UNREADABLE:
        return f"HAMi-core's region of this container cannot be used: {cap(use.reason)}."
    return (
        "No process of this container has used its GPU through HAMi-core; try again once one has, "
        "or check that its programs load HAMi-core."
    )


def _too_low(before: Row, row: Row, use: ContainerUse, inventory: Inventory) -> str:
    """Which limit was lowered below what is in use; empty: none."""
    for place, share in enumerate(row.limits):
        limit, was = _mib(row, place), _mib(before, place)
        used = sum(gpu.memory.total for gpu in use.gpus if gpu.uuid == share.uuid)
        if limit < was and used > limit * MIB:
            return (
                f"The container uses {-(-used // MIB)} MiB of GPU {inventory.label(share.uuid)} "
                "now, and below that HAMi-core would fail each of its allocations; choose a higher "
                "limit, or let it free memory first."
            )
    return ""


def _mib(row: Row, place: int) -> int:
    """The memory limit in force; of a share of all memory, that of the answer."""
    return row.limits[place].memory_mib or answered_mib(row, place) or 0


def _too_high(before: Row, row: Row, facts: LimitFacts) -> str:
    """Which limit has no room on its GPU; empty: all fit."""
    for place, (old, new) in enumerate(zip(before.limits, row.limits, strict=True)):
        if old == new:
            continue
        gpu = facts.inventory.find(new.uuid)
        if gpu is None:
            return f"GPU {new.uuid} is not on this node any more; delete the pod."
        text = _beyond_slices(row, place, gpu) or _beyond_room(before, row, gpu, facts)
        if text:
            return text
    return ""


def _beyond_slices(row: Row, place: int, gpu: SharedGpu) -> str:
    """In plain mode the kubelet may give the other slices to anybody at any time."""
    own, new = row.shares[place].memory_mib, row.limits[place].memory_mib
    if row.decided_by is Decider.SCHEDULER or new <= own:
        return ""
    return (
        f"The container's slices of GPU {gpu.gpu.label} have {own} MiB, and the kubelet "
        f"may give the others to new pods; choose at most {own} MiB."
    )


def _beyond_room(before: Row, row: Row, gpu: SharedGpu, facts: LimitFacts) -> str:
    """What HAMi's scheduler counts and what is true must both fit, as for an Allocate."""
    others = [one for one in facts.ledger.rows if one.key != row.key and _is_there(one, facts)]
    for claims, old, new in (
        (
            _scheduled(others, facts),
            _scheduled([before], facts),
            _scheduled([row], facts),
        ),
        (_true(others, facts), [claim_of(before)], [claim_of(row)]),
    ):
        was, total = gpu_use((*claims, *old), gpu), gpu_use((*claims, *new), gpu)
        for what, unit, least, most, has in (
            ("memory", "MiB", was.memory_mib, total.memory_mib, gpu.registered_mib),
            ("compute", "%", was.core_percent, total.core_percent, gpu.core_percent),
        ):
            if most > has and most > least:
                free = max(has - least, 0)
                return (
                    f"GPU {gpu.gpu.label} would have {most} {unit} of {what} promised, and it has "
                    f"{has} {unit}; {free} {unit} are free: choose less, or end another pod."
                )
    return ""


def _scheduled(rows: Iterable[Row], facts: LimitFacts) -> list[RoomClaim]:
    claims = (scheduled(row, facts.pods.get(row.key.pod_uid)) for row in rows)
    return [claim for claim in claims if claim is not None]


def _true(rows: Iterable[Row], facts: LimitFacts) -> list[RoomClaim]:
    return [claim_of(row) for row in rows if counts(row, facts.pods.get(row.key.pod_uid))]
