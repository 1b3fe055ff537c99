"""What people are told when GPUs change: the Events between one inventory and the next."""

import dataclasses
from collections.abc import Iterable, Iterator

from agent.core.changes import NodeEvent
from agent.core.condition import Cause, Condition, Health
from agent.core.inventory import Inventory, SharedGpu
from agent.core.ledger import Ledger

WELL = "answers again, and its events reach the agent"


@dataclasses.dataclass(frozen=True, slots=True)
class _Told:
    """What is to be said of one GPU."""

    reason: str
    text: str
    warning: bool = True


def gpu_events(old: Inventory, new: Inventory, ledger: Ledger) -> tuple[NodeEvent, ...]:
    """The Events that `new` gives rise to after `old`; equal words of several GPUs are one Event.

    On the Node: GpuUnhealthy, GpuRecovered, GpuUnmonitored, GpuDriverUnresponsive and
    GpuInventoryChanged. On each pod that holds a GPU which is served no more: GpuDegradedForPod.
    """
    return (*_of_health(old, new), *_of_inventory(old, new), *_of_pods(old, new, ledger))


def named(gpus: Iterable[SharedGpu]) -> str:
    """These GPUs for people, by index."""
    found = sorted(gpus, key=lambda gpu: (gpu.gpu.index, gpu.uuid))
    if len(found) == 1:
        return f"GPU {found[0].gpu.index} ({found[0].uuid})"
    return f"GPUs {', '.join(str(gpu.gpu.index) for gpu in found)}"


def _of_health(old: Inventory, new: Inventory) -> Iterator[NodeEvent]:
    told: dict[_Told, list[SharedGpu]] = {}
    for gpu in new.gpus:
        before = old.find(gpu.uuid)
        one = _change(before.health, gpu.health) if before else _first(gpu.health)
        if one is not None:
            told.setdefault(one, []).append(gpu)
    for one, gpus in told.items():
        yield NodeEvent(one.reason, f"{named(gpus)}: {one.text}", one.warning)


def _first(health: Health) -> _Told | None:
    """Of a GPU that was not there before: only what is wrong with it."""
    return _worse(health) if health.condition not in {Condition.OK, Condition.WATCH} else None


def _change(before: Health, health: Health) -> _Told | None:
    if _state(before) == _state(health):
        return None
    if health.ill or not _is_well(health):
        return _worse(health)
    if before.cause == Cause.OFF:
        return None
    text = (
        WELL if before.condition is Condition.UNMONITORED else f"well again, after: {before.text}"
    )
    return _Told("GpuRecovered", text, warning=False)


def _worse(health: Health) -> _Told:
    if health.ill:
        return _Told("GpuUnhealthy", health.text)
    if not health.silent:
        return _Told("GpuUnmonitored", health.text)
    if health.serving:
        return _Told("GpuDriverUnresponsive", health.text)
    return _Told("GpuUnhealthy", f"not served any more, for it {health.text}")


def _is_well(health: Health) -> bool:
    return health.condition in {Condition.OK, Condition.WATCH}


def _state(health: Health) -> tuple[object, ...]:
    """What an Event is worth: bad and lost are one, and so are ok and watched."""
    if health.ill or _is_well(health):
        return (health.ill,)
    return (health.cause, health.serving)


def _of_inventory(old: Inventory, new: Inventory) -> Iterator[NodeEvent]:
    present = {gpu.uuid: gpu for gpu in old.gpus if gpu.present}
    still = {gpu.uuid: gpu for gpu in new.gpus if gpu.present}
    lost = {gpu.uuid for gpu in new.gpus if gpu.health.condition is Condition.LOST}
    words = (
        ("no longer shared", [g for u, g in present.items() if u not in still and u not in lost]),
        ("shared now", [g for u, g in still.items() if u not in present]),
    )
    text = "; ".join(f"{told}: {named(gpus)}" for told, gpus in words if gpus)
    if text:
        yield NodeEvent("GpuInventoryChanged", text, warning=False)


def _of_pods(old: Inventory, new: Inventory, ledger: Ledger) -> Iterator[NodeEvent]:
    """One Event for each pod, with the first of its GPUs that is served no more."""
    served = {gpu.uuid for gpu in old.gpus if gpu.serving}
    fallen = {gpu.uuid: gpu for gpu in new.gpus if gpu.uuid in served and not gpu.serving}
    told: set[str] = set()
    for row in ledger.rows if fallen else ():
        gpu = next((fallen[one.uuid] for one in row.shares if one.uuid in fallen), None)
        if gpu is None or row.key.pod_uid in told:
            continue
        told.add(row.key.pod_uid)
        why = gpu.health.text if not gpu.health.serving else "it is not on the node any more"
        yield NodeEvent(
            "GpuDegradedForPod",
            f"{named([gpu])}, which the pod holds: {why}. The agent leaves the pod alone.",
            warning=True,
            namespace=row.namespace,
            pod=row.pod,
            pod_uid=row.key.pod_uid,
        )
