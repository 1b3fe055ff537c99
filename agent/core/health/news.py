"""What people are told of GPUs: Events from one inventory to the next, the Node's condition.

One turn of fate is one Event: what may turn again in a moment is not news yet.
"""

import dataclasses
import datetime as dt
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from agent.core.cluster.changes import NO_POD, NodeEvent
from agent.core.cluster.pods import PodTable, PodUid
from agent.core.health.verdicts import past
from agent.core.inventory.condition import Cause, Condition, Health
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory, SharedGpu
from agent.core.state.ledger import Ledger

_Pod = tuple[str, str, PodUid]
"""Namespace, name and UID."""

WELL: Final = "answers again, and its events reach the agent"
GPU_DEGRADED: Final = "GpuDegraded"
TEXT_LIMIT: Final = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class _GpuNews:
    """What is to be said of one GPU."""

    reason: str
    text: str
    warning: bool = True


def gpu_events(
    old: Inventory, new: Inventory, ledger: Ledger, left_out: Collection[str] = ()
) -> tuple[NodeEvent, ...]:
    """The Events that `new` gives rise to after `old`; equal words of several GPUs are one Event.

    On the Node: GpuUnhealthy, GpuRecovered, GpuUnmonitored, GpuDriverUnresponsive,
    GpuReleased and GpuInventoryChanged. On each pod that holds a GPU which has come to harm, or on
    the Node for a pod of which only the name is known: GpuDegradedForPod. Why a GPU of `left_out`
    is shared no longer, another Event says.
    """
    return (
        *_of_health(old, new),
        *_of_inventory(old, new, left_out),
        *_of_pods(old, new, ledger),
    )


def turning(said: Inventory, new: Inventory) -> frozenset[GpuUuid]:
    """The GPUs of which the news may turn again in a moment, and that nothing else is new of.

    A return from silence, and the coming and going of a GPU that is ill or silent: the steps of a
    reset, or of a driver that stutters. And that a well one is gone, but not from our view: a probe
    finds that in a moment, and its health tells it. And that one is taken back and has not answered
    yet. What gets worse is no such news.
    """
    pairs = ((before, new.find(before.uuid)) for before in said.gpus)
    return frozenset(before.uuid for before, gpu in pairs if _may_turn(before, gpu))


def believed(said: Inventory, new: Inventory, doubted: Collection[GpuUuid]) -> Inventory:
    """`new`, but the `doubted` GPUs are as they were `said` to be."""
    kept = (gpu for gpu in said.gpus if gpu.uuid in doubted)
    fresh = (gpu for gpu in new.gpus if gpu.uuid not in doubted)
    return dataclasses.replace(new, gpus=(*fresh, *kept))


def _may_turn(said: SharedGpu, gpu: SharedGpu | None) -> bool:
    if gpu is None:
        return _is_unwell(said.health)
    if _state(said.health) == _state(gpu.health):
        moved = said.present != gpu.present
        is_gone = not gpu.present and not gpu.there and gpu.health.cause != Cause.OFF
        return moved and (is_gone or _is_unwell(said.health))
    if said.health.cause == Cause.RELEASED and gpu.health.silent:
        return True
    is_better = _is_well(gpu.health) or (said.health.silent and gpu.health.cause == Cause.MONITOR)
    return is_better and _is_unwell(said.health) and not said.health.ill


def _is_unwell(health: Health) -> bool:
    return not _is_well(health) and health.cause != Cause.OFF


def named(gpus: Iterable[SharedGpu]) -> str:
    """These GPUs for people, by index."""
    found = sorted(gpus, key=lambda gpu: (gpu.gpu.index, gpu.uuid))
    if len(found) == 1:
        return found[0].gpu.title
    return f"GPUs {', '.join(gpu.gpu.label for gpu in found)}"


def holders(ledger: Ledger, gpus: Collection[GpuUuid], table: PodTable) -> tuple[str, ...]:
    """The pods that have slices of these GPUs, as namespace/name; those of which one is known.

    A row outlives its pod by a minute: a pod that the table knows to be over is none of them.
    """
    rows = (row for row in ledger.rows if row.holder and not set(gpus).isdisjoint(row.gpus))
    known = {(row.namespace, row.pod) for row in rows if not _is_over(table, row.pod_uid)}
    return tuple(sorted("/".join(pod) for pod in known))


def _is_over(table: PodTable, uid: PodUid) -> bool:
    """Whether the pod is gone or has ended; of a table that is not up to date nobody knows."""
    if uid == NO_POD or not table.synced or table.stale:
        return False
    pod = table.pods.get(uid)
    return pod is None or pod.terminal


def _of_health(old: Inventory, new: Inventory) -> Iterator[NodeEvent]:
    told: dict[_GpuNews, list[SharedGpu]] = {}
    for gpu in new.gpus:
        before = old.find(gpu.uuid)
        one = _change(before.health, gpu.health) if before else _first(gpu.health)
        if one is not None:
            told.setdefault(one, []).append(gpu)
    for one, gpus in told.items():
        yield NodeEvent(one.reason, f"{named(gpus)}: {one.text}", one.warning)


def _first(health: Health) -> _GpuNews | None:
    """Of a GPU that was not there before: only what is wrong with it."""
    return _worse(health) if health.condition not in {Condition.OK, Condition.WATCH} else None


def _change(before: Health, health: Health) -> _GpuNews | None:
    if _state(before) == _state(health):
        return None
    if health.ill or not _is_well(health):
        return _worse(health)
    if before.cause == Cause.OFF:
        return None
    if before.cause == Cause.RELEASED:
        return _GpuNews("GpuRecovered", "taken back, and well", warning=False)
    was_unheard = before.condition is Condition.UNMONITORED
    text = WELL if was_unheard else f"well again, after: {past(before)}"
    return _GpuNews("GpuRecovered", text, warning=False)


def _worse(health: Health) -> _GpuNews:
    if health.ill:
        return _GpuNews("GpuUnhealthy", health.text)
    if health.cause == Cause.RELEASED:
        return _GpuNews("GpuReleased", health.text, warning=False)
    if not health.silent:
        return _GpuNews("GpuUnmonitored", health.text)
    if health.serving:
        return _GpuNews("GpuDriverUnresponsive", health.text)
    return _GpuNews("GpuUnhealthy", f"not served any more: {health.text}")


def _is_well(health: Health) -> bool:
    return health.condition in {Condition.OK, Condition.WATCH}


def _state(health: Health) -> tuple[object, ...]:
    """What an Event is worth: bad and lost are one, and so are ok and watched."""
    if health.ill or _is_well(health):
        return (health.ill,)
    return (health.cause, health.serving)


def _of_inventory(old: Inventory, new: Inventory, left_out: Collection[str]) -> Iterator[NodeEvent]:
    present = {gpu.uuid: gpu for gpu in old.gpus if gpu.present}
    still = {gpu.uuid: gpu for gpu in new.gpus if gpu.present}
    lost = {gpu.uuid for gpu in new.gpus if gpu.health.condition is Condition.LOST}
    told = {*still, *lost, *left_out}
    words = (
        ("no longer shared", [g for u, g in present.items() if u not in told]),
        ("shared now", [g for u, g in still.items() if u not in present and g.serving]),
    )
    text = "; ".join(f"{word}: {named(gpus)}" for word, gpus in words if gpus)
    if text:
        yield NodeEvent("GpuInventoryChanged", text, warning=False)


def _of_pods(old: Inventory, new: Inventory, ledger: Ledger) -> Iterator[NodeEvent]:
    """One Event for each pod, with the first of its GPUs that has come to harm."""
    well = {gpu.uuid for gpu in old.gpus if not _harm(gpu)}
    fallen = {gpu.uuid: gpu for gpu in new.gpus if gpu.uuid in well and _harm(gpu)}
    told: set[_Pod] = set()
    for row in ledger.rows if fallen else ():
        gpu = next((fallen[uuid] for uuid in row.gpus if uuid in fallen), None)
        pod = row.namespace, row.pod, row.pod_uid
        if gpu is not None and row.holder and pod not in told:
            told.add(pod)
            yield _degraded(gpu, *pod)


def _harm(gpu: SharedGpu) -> str:
    """What is wrong for those who have the GPU; one that is only filtered out serves them well."""
    if not gpu.health.serving:
        return gpu.health.text
    if not gpu.there:
        return gpu.obstacle or "it is not on the node any more"
    return "it was switched to MIG mode, which is not shared" if gpu.gpu.mig_enabled else ""


def _degraded(gpu: SharedGpu, namespace: str, pod: str, uid: PodUid) -> NodeEvent:
    """On the pod; on the Node where its UID is not known."""
    who = "the pod" if uid else f"pod {namespace}/{pod}"
    text = f"{named([gpu])}, which {who} holds: {_harm(gpu)}. The agent leaves the pod alone."
    event = NodeEvent("GpuDegradedForPod", text, warning=True)
    if not uid:
        return event
    return dataclasses.replace(event, namespace=namespace, pod=pod, pod_uid=uid)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeCondition:
    """A condition of the Node, in the sense of node-problem-detector: true is bad."""

    kind: str
    status: bool
    reason: str
    message: str
    since: dt.datetime


def gpu_degraded(inventory: Inventory, now: dt.datetime) -> NodeCondition:
    """Whether GPUs of this node are not served, and which.

    While some are ill, `since` outlives a restart, as their health does. Of one that is only not
    there health says nothing: it is so from now on.
    """
    # One that is only kept because a slice of it is held is nobody's loss.
    gpus = [gpu for gpu in inventory.gpus if gpu.present or gpu.wanted]
    ill = [gpu for gpu in gpus if not gpu.serving]
    if not ill:
        since = max((gpu.health.since for gpu in gpus), default=now)
        count = len(gpus)
        few = {0: "there are no GPUs to share", 1: "the only GPU is served"}
        text = few.get(count, f"all {count} GPUs are served")
        return NodeCondition(
            GPU_DEGRADED, status=False, reason="AllServed", message=text, since=since
        )
    text = "; ".join(f"{gpu.gpu.title} {gpu.plight}" for gpu in ill)
    since = min((gpu.health.since for gpu in ill if not gpu.health.serving), default=now)
    text = text[:TEXT_LIMIT]
    return NodeCondition(GPU_DEGRADED, status=True, reason="NotServed", message=text, since=since)
