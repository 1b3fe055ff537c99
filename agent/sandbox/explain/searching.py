"""The gate of placement as one verdict: does a Node fit, and does the scheduler know it?"""

import datetime as dt
import re
from collections import Counter
from typing import Final

import msgspec

from agent.core.cluster import annotations
from agent.core.cluster.snapshot import JsonObject, PodEventView
from agent.core.errors import cap
from agent.sandbox.explain.binding import last_event
from agent.sandbox.explain.placement import ModelPlacement
from agent.sandbox.explain.story import Gate, GateVerdict
from agent.sandbox.explain.words import ADVICE, KUBE_SCHEDULER, ago, counted
from agent.sandbox.explain.world import World

PLACEMENT: Final = "placement"
INGESTED: Final = dt.timedelta(seconds=30)
"""Two rounds of 15 s in which the scheduler reads the Nodes: then it knows a change."""
RETRY_HOW: Final = (
    "kube-scheduler tries such a pod again after at most 5 min; a change of a Node or of the pod, "
    "such as kubectl label pod, makes it try now"
)
_DERIVED: Final = frozenset({"AllocatedCardsInsufficientRequest", "NumaNotFit"})
_NOWHERE: Final = re.compile(r"\d+/\d+ nodes are available|no nodes available")
_FOREIGN: Final = re.compile(
    r"Insufficient (?!nvidia\.com/)|didn't (?:match|satisfy|find|have)|untolerated taint|"
    r"volume|free ports|Too many pods"
)
_REPORT_ONLY: Final = re.compile(
    r"node unregistered|CardNotHealth|CardTypeMismatch|CardUuidMismatch|CardCordoned|"
    r"NodeInsufficientDevice"
)
"""Reasons that no other pod causes: only what the Node reports."""


def chosen_gate(pod: JsonObject) -> Gate:
    """The gate of a pod that has a Node."""
    node = cap(pod["spec"]["nodeName"], 128)
    noted = pod["metadata"].get("annotations") or {}
    if annotations.VGPU_NODE in noted:
        return Gate(PLACEMENT, GateVerdict.PASSED, f"HAMi's scheduler chose {node}")
    said = f"the pod is on {node}, and HAMi's scheduler chose no GPUs for it"
    return Gate(PLACEMENT, GateVerdict.NOTED, said, "E-SCHEDULER")


def foreign_gate(world: World, now: dt.datetime) -> Gate:
    """The gate of a pod that kube-scheduler places alone."""
    event = _unscheduled(world)
    if event is None:
        said = "kube-scheduler alone places this pod, and it has told no failure"
        return Gate(PLACEMENT, GateVerdict.WAITING, said)
    said = f"kube-scheduler places it nowhere, {_when(event, now)}: {cap(event.message)}"
    return Gate(PLACEMENT, GateVerdict.BLOCKED, said, KUBE_SCHEDULER, ADVICE[KUBE_SCHEDULER])


def searched_gate(world: World, placement: ModelPlacement, now: dt.datetime) -> Gate:
    """The gate of a pod without a Node, by the model's answer for all Nodes."""
    event = _last_refusal(world)
    if not placement.fitting:
        return _nowhere(placement, event, now)
    kube = _unscheduled(world)
    if kube is not None and _FOREIGN.search(kube.message):
        nodes = counted(len(placement.fitting), "Node")
        said = f"HAMi's rules allow {nodes}, but kube-scheduler's own rules allow none"
        told = (f"kube-scheduler, {_when(kube, now)}: {cap(kube.message)}",)
        advice = "its message names what is missing besides GPUs"
        return Gate(PLACEMENT, GateVerdict.BLOCKED, said, KUBE_SCHEDULER, advice, told)
    return _somewhere(world, placement, event, now)


def _somewhere(
    world: World, placement: ModelPlacement, event: PodEventView | None, now: dt.datetime
) -> Gate:
    fits = f"it fits on {counted(len(placement.fitting), 'Node')} now"
    first = cap(placement.fitting[0], 128)
    fits += f" ({first})" if len(placement.fitting) == 1 else f" ({first} and others)"
    if event is None or _succeeded_later(world, event):
        return Gate(PLACEMENT, GateVerdict.PASSED, fits)
    told = (f"last attempt {_when(event, now)}: {cap(event.message)}",)
    if _is_stale(world, placement, event, now):
        said = f"{fits}, but the scheduler refused it after the Node's report had changed"
        advice = (
            "the scheduler uses an older report: restart HAMi's scheduler once; 2.8 and 2.9 read a "
            "report again only when the number of slices changes"
        )
        return Gate(PLACEMENT, GateVerdict.BLOCKED, said, "E-STALE", advice, told)
    said, advice = f"{fits}; the scheduler has not tried since", RETRY_HOW
    if _is_unread(world, placement):
        said = f"{fits}; the scheduler has not read it since"
        advice = f"wait until HAMi's scheduler has read it, which takes 15 s; {RETRY_HOW}"
    return Gate(PLACEMENT, GateVerdict.WAITING, said, "E-RETRY", advice, told)


def _unscheduled(world: World) -> PodEventView | None:
    """The Event of kube-scheduler's last failed attempt, with what that attempt said.

    kube-scheduler counts a repeated Event and keeps its first text; the pod's condition has the
    last one. Source: client-go 1.36 tools/events/event_broadcaster.go, getKey.
    """
    event = last_event(world, "FailedScheduling")
    conditions = world.snapshot.pod["status"].get("conditions") or ()
    told = (
        str(one.get("message") or "")
        for one in conditions
        if one.get("type") == "PodScheduled" and one.get("status") == "False"
    )
    if event is None or not (text := next(told, "")):
        return event
    return msgspec.structs.replace(event, message=text)


def _last_refusal(world: World) -> PodEventView | None:
    """The scheduler's last Event that no Node fits; not one that a binding failed."""
    filtered, kube = last_event(world, "FilteringFailed"), _unscheduled(world)
    if kube is None or kube.last is None or not _NOWHERE.match(kube.message):
        return filtered
    if filtered is None or filtered.last is None:
        return kube
    return kube if kube.last > filtered.last else filtered


def _nowhere(placement: ModelPlacement, event: PodEventView | None, now: dt.datetime) -> Gate:
    told = (f"last attempt {_when(event, now)}: {cap(event.message)}",) if event else ()
    if placement.without_gpus:
        told = (*told, f"not counted: {counted(placement.without_gpus, 'Node')} without GPUs")
    if not placement.refused:
        said = "no Node of the cluster reports GPUs to HAMi's scheduler"
        advice = ADVICE["NodeUnregistered"]
        return Gate(PLACEMENT, GateVerdict.BLOCKED, said, "NodeUnregistered", advice, told)
    said = f"none of {placement.refused:,} Nodes with GPUs fits"
    if placement.refused == 1:
        said = "the only Node with GPUs does not fit"
    reason = _main_reason(placement)
    if reason == "CardInsufficientMemory" and placement.is_oversized:
        told = (*told, "no GPU of the cluster has so much memory, even without other pods")
    return Gate(PLACEMENT, GateVerdict.BLOCKED, said, reason, ADVICE.get(reason, ""), told)


def is_mixed(placement: ModelPlacement) -> bool:
    """Whether the Nodes have several reasons, of which none follows from the others."""
    return len(placement.reasons.keys() - _DERIVED) > 1


def _main_reason(placement: ModelPlacement) -> str:
    """The reason of most Nodes; among equals, that of most GPUs of the nearest Node.

    That too few GPUs fit follows from the reasons of the others, if there are others.
    """
    if not placement.reasons:
        return ""
    gpus = Counter(gpu.reason for node in placement.nodes[:1] for gpu in node.gpus)
    return max(
        placement.reasons,
        key=lambda code: (code not in _DERIVED, placement.reasons[code], gpus[code]),
    )


def _is_stale(
    world: World, placement: ModelPlacement, event: PodEventView, now: dt.datetime
) -> bool:
    """Whether the scheduler refused a Node whose report it had to know by then.

    If another pod had ended since, kube-scheduler would have tried again within seconds. A reason
    that no pod causes needs no such wait.
    """
    if event.last is None or _is_unread(world, placement):
        return False
    reports = (world.nodes[name].reported for name in placement.fitting)
    is_known = any(stamp is not None and stamp + INGESTED <= event.last for stamp in reports)
    is_settled = now - event.last >= INGESTED or bool(_REPORT_ONLY.search(event.message))
    return is_known and is_settled


def _is_unread(world: World, placement: ModelPlacement) -> bool:
    """Whether the scheduler has yet to read a Node of which a GPU was uncordoned.

    Schedulers that know cordons, 2.10 and later, write the handshake when they read the Node.
    """
    knows_cordons = any("CardCordoned" in event.message for event in world.snapshot.events)
    nodes = (world.nodes[name] for name in placement.fitting)
    return knows_cordons and any(annotations.HANDSHAKE not in node.annotations for node in nodes)


def _succeeded_later(world: World, refused: PodEventView) -> bool:
    event = last_event(world, "FilteringSucceed", "BindingFailed")
    if event is None or event.last is None or refused.last is None:
        return False
    return event.last >= refused.last


def _when(event: PodEventView, now: dt.datetime) -> str:
    return ago(event.last, now) if event.last else "at an unknown time"
