"""Makes the Events about GPUs from two inventories, and the Node condition GpuDegraded.

A change that may reverse within seconds (`turning`) is not reported yet.
"""

import datetime as dt
from collections.abc import Collection, Iterable, Iterator
from typing import Final

import msgspec

from agent.cluster import NodeCondition, NodeEvent, PodTable, PodUid
from agent.health.judge import past
from agent.ledger import Ledger
from agent.model import Cause, Condition, GpuUuid, Health, Inventory, SharedGpu

_Pod = tuple[str, str, PodUid]
"""Namespace, name and UID."""

WELL: Final = "answers again, and the agent receives its events"
GPU_DEGRADED: Final = "GpuDegraded"
TEXT_LIMIT: Final = 1024


def gpu_events(
    old: Inventory, new: Inventory, ledger: Ledger, left_out: Collection[str] = ()
) -> tuple[NodeEvent, ...]:
    """The Events for the differences between `old` and `new`.

    - On the Node: GpuUnhealthy, GpuRecovered, GpuUnmonitored, GpuDriverUnresponsive, GpuReleased
      and GpuInventoryChanged. Several GPUs with the same text share one Event.
    - On each pod that holds a GPU which became unusable: GpuDegradedForPod. If only the pod's name
      is known, the Event is on the Node.

    `left_out`: GPUs for which another Event says why they are no longer shared.
    """
    return (
        *_of_health(old, new),
        *_of_inventory(old, new, left_out),
        *_of_pods(old, new, ledger),
    )


def turning(said: Inventory, new: Inventory) -> frozenset[GpuUuid]:
    """The GPUs whose only change may reverse within seconds, so that its Event should wait.

    - A silent GPU answers again; or an unhealthy or silent GPU comes or goes. Resets and a driver
      that answers irregularly look like this.
    - A healthy GPU is gone, but still in the inventory: the next probe makes it unhealthy.
    - A GPU was taken back and has not answered yet.

    A change for the worse is never among them.
    """
    pairs = ((before, new.find(before.uuid)) for before in said.gpus)
    return frozenset(before.uuid for before, gpu in pairs if _may_turn(before, gpu))


def believed(said: Inventory, new: Inventory, doubted: Collection[GpuUuid]) -> Inventory:
    """`new`, with the `doubted` GPUs as they are in `said`, the inventory reported last."""
    kept = (gpu for gpu in said.gpus if gpu.uuid in doubted)
    fresh = (gpu for gpu in new.gpus if gpu.uuid not in doubted)
    return msgspec.structs.replace(new, gpus=(*fresh, *kept))


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
    """The GPUs in words, sorted by index."""
    in_order = sorted(gpus, key=lambda gpu: (gpu.gpu.index, gpu.uuid))
    if len(in_order) == 1:
        return in_order[0].gpu.title
    return f"GPUs {', '.join(gpu.gpu.label for gpu in in_order)}"


def holders(ledger: Ledger, gpus: Collection[GpuUuid], table: PodTable) -> tuple[str, ...]:
    """The pods that have slices of these GPUs, as namespace/name.

    A row without a known pod is left out, and so is a pod that has ended, while that can be seen.
    """
    rows = ledger.rows if table.stale else ledger.living(table).rows
    using = (row for row in rows if row.holder and not set(gpus).isdisjoint(row.gpus))
    known = {(row.namespace, row.pod) for row in using}
    return tuple(sorted("/".join(pod) for pod in known))


def _of_health(old: Inventory, new: Inventory) -> Iterator[NodeEvent]:
    by_news: dict[NodeEvent, list[SharedGpu]] = {}
    for gpu in new.gpus:
        before = old.find(gpu.uuid)
        if before is not None:
            news = _change(before.health, gpu.health)
        else:  # of a GPU that was not there, only that it is not healthy
            news = None if _is_well(gpu.health) else _worse(gpu.health)
        if news is not None:
            by_news.setdefault(news, []).append(gpu)
    for news, gpus in by_news.items():
        yield msgspec.structs.replace(news, text=f"{named(gpus)}: {news.text}")


def _change(before: Health, health: Health) -> NodeEvent | None:
    if _state(before) == _state(health):
        return None
    if health.ill or not _is_well(health):
        return _worse(health)
    if before.cause == Cause.OFF:
        return None
    if before.cause == Cause.RELEASED:
        return NodeEvent("GpuRecovered", "taken back, and healthy", warning=False)
    was_unheard = before.condition is Condition.UNMONITORED
    text = WELL if was_unheard else f"healthy again, after: {past(before)}"
    return NodeEvent("GpuRecovered", text, warning=False)


def _worse(health: Health) -> NodeEvent:
    if health.ill:
        return NodeEvent("GpuUnhealthy", health.text, warning=True)
    if health.cause == Cause.RELEASED:
        return NodeEvent("GpuReleased", health.text, warning=False)
    if not health.silent:
        return NodeEvent("GpuUnmonitored", health.text, warning=True)
    if health.serving:
        return NodeEvent("GpuDriverUnresponsive", health.text, warning=True)
    return NodeEvent("GpuUnhealthy", f"not served any more: {health.text}", warning=True)


def _is_well(health: Health) -> bool:
    return health.condition in {Condition.OK, Condition.WATCH}


def _state(health: Health) -> tuple[object, ...]:
    """The part of health that an Event reports. Bad equals lost, and ok equals watched."""
    if health.ill or _is_well(health):
        return (health.ill,)
    return (health.cause, health.serving)


def _of_inventory(old: Inventory, new: Inventory, left_out: Collection[str]) -> Iterator[NodeEvent]:
    present = {gpu.uuid: gpu for gpu in old.gpus if gpu.present}
    still = {gpu.uuid: gpu for gpu in new.gpus if gpu.present}
    lost = {gpu.uuid for gpu in new.gpus if gpu.health.condition is Condition.LOST}
    explained = {*still, *lost, *left_out}
    changes = (
        ("no longer shared", [g for u, g in present.items() if u not in explained]),
        ("shared now", [g for u, g in still.items() if u not in present and g.serving]),
    )
    text = "; ".join(f"{change}: {named(gpus)}" for change, gpus in changes if gpus)
    if text:
        yield NodeEvent("GpuInventoryChanged", text, warning=False)


def _of_pods(old: Inventory, new: Inventory, ledger: Ledger) -> Iterator[NodeEvent]:
    """One Event for each pod, about the first of its GPUs that became unusable."""
    well = {gpu.uuid for gpu in old.gpus if not _harm(gpu)}
    fallen = {gpu.uuid: gpu for gpu in new.gpus if gpu.uuid in well and _harm(gpu)}
    told: set[_Pod] = set()
    for row in ledger.rows if fallen else ():
        gpu = next((fallen[uuid] for uuid in row.gpus if uuid in fallen), None)
        pod = row.namespace, row.pod, row.pod_uid
        if gpu is None or not row.holder or pod in told:
            continue
        told.add(pod)
        # Without the UID of the pod, the Event is on the Node.
        who = "the pod" if row.pod_uid else f"pod {row.namespace}/{row.pod}"
        text = f"{named([gpu])}, which {who} holds: {_harm(gpu)}. The agent does not stop the pod."
        event = NodeEvent("GpuDegradedForPod", text, warning=True)
        if row.pod_uid:
            event = msgspec.structs.replace(
                event, namespace=row.namespace, pod=row.pod, pod_uid=row.pod_uid
            )
        yield event


def _harm(gpu: SharedGpu) -> str:
    """What is wrong with the GPU for containers that hold it; empty if it is only filtered out."""
    if not gpu.health.serving:
        return gpu.health.text
    if not gpu.there:
        return gpu.obstacle or "it is not on the node any more"
    return "it was switched to MIG mode, which is not shared" if gpu.gpu.mig_enabled else ""


def gpu_degraded(inventory: Inventory, now: dt.datetime) -> NodeCondition:
    """The Node condition GpuDegraded: whether GPUs of this node are not served, and which.

    `since` is the earliest `since` of the unhealthy GPUs, so it survives a restart. If none is
    unhealthy and some are only absent, it is `now`.
    """
    # A GPU that is kept only because a container holds a slice of it does not count.
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
