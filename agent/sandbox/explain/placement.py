"""The gate of placement: each Node and each GPU with the figures, by the scheduler's model."""

import datetime as dt
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from agent import cluster as annotations
from agent.allocate.room import ContainerRequest
from agent.errors import MalformedText, cap
from agent.hami.pod import decode_pod_devices
from agent.kube.reader import GpuHolder, JsonObject, PodEventView
from agent.sandbox.explain.gates import last_event
from agent.sandbox.explain.story import (
    ADVICE,
    KUBE_SCHEDULER,
    NODE_UNREGISTERED,
    Gate,
    GateVerdict,
    GpuVerdict,
    NodeVerdict,
    mib,
    refused_gpu,
    when,
)
from agent.sandbox.explain.world import UNREGISTERED, World, refuse_node, version_of
from agent.sandbox.scheduler.filter import NodeFit
from agent.sandbox.scheduler.model import GpuView
from agent.sandbox.scheduler.registry import read_offer
from agent.sandbox.scheduler.requests import Steering, pod_requests
from agent.status import counted

NODES_TOLD: Final = 20
HOLDERS_TOLD: Final = 3
_TOKEN: Final = re.compile(r"(?:\d+/\d+ )?([A-Za-z]+)")
_EVENT: Final = re.compile(r"(\d+) nodes (\w+)\((.*)\)", re.DOTALL)
_SCHEDULER_TOTAL: Final = re.compile(r"no available node, (\d+) nodes do not meet")
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


class ModelPlacement(msgspec.Struct, frozen=True):
    """The answer for all Nodes. `fitting`: their names. `reasons`: Nodes by reason.

    `nodes`: the Nodes nearest to a fit, at most NODES_TOLD. `is_oversized`: even an empty GPU of
    the cluster has less memory than a container asks for.
    """

    fitting: tuple[str, ...]
    nodes: tuple[NodeVerdict, ...]
    reasons: Mapping[str, int]
    refused: int
    without_gpus: int
    is_oversized: bool = False


def place(world: World, pod: JsonObject) -> ModelPlacement:
    """Try the pod on every Node. Raises BadWeightsError."""
    fits = {name: world.fit(pod, name) for name in sorted(world.nodes)}
    fitting = tuple(name for name, fit in fits.items() if fit.groups is not None)
    bare = {
        name
        for name, fit in fits.items()
        if fit.groups is None and not world.has_gpus(world.nodes[name])
    }
    refused = [name for name in fits if name not in bare and fits[name].groups is None]
    reasons = Counter(code for name in refused for code in codes_of(fits[name].reason))
    refused.sort(key=lambda name: (_distance(fits[name]), name))
    told = [*fitting[:HOLDERS_TOLD], *_one_of_each_kind_first(refused, fits)][:NODES_TOLD]
    requests = pod_requests(dict(pod), world.settings)
    tried = [
        (gpu.capacity.registered_mib, request)
        for fit in fits.values()
        if fit.gpus and (request := requests[fit.position]) is not None
        for gpu in fit.gpus
    ]
    return ModelPlacement(
        fitting=fitting,
        nodes=tuple(_verdict(world, pod, name, fits[name], requests) for name in told),
        reasons=dict(sorted(reasons.items())),
        refused=len(refused),
        without_gpus=len(bare),
        is_oversized=bool(tried) and all(size < one.memory_on(size) for size, one in tried),
    )


def codes_of(reason: str) -> tuple[str, ...]:
    """The runbook's ids for the scheduler's text about one Node."""
    if reason == UNREGISTERED:
        return (NODE_UNREGISTERED,)
    found = [_TOKEN.fullmatch(token) for token in reason.split(", ")]
    if not all(found):
        return (KUBE_SCHEDULER,)
    return tuple(match[1] for match in found if match)


def told_by_events(events: Iterable[PodEventView]) -> ModelPlacement | None:
    """The placement as the scheduler's own Events tell it; None if they tell none."""
    nodes: dict[str, list[str]] = {}
    total = 0
    for event in events:
        if event.reason != "FilteringFailed":
            continue
        if all_nodes := _SCHEDULER_TOTAL.fullmatch(event.message):
            total = max(total, int(all_nodes[1]))
        if told := _EVENT.fullmatch(event.message):
            for name in told[3].split(","):
                if told[2] not in nodes.setdefault(name, []):
                    nodes[name].append(told[2])
    total = max(total, len(nodes))
    if not total:
        return None
    verdicts = tuple(
        NodeVerdict(
            name=name,
            is_fit=False,
            reason=", ".join(codes),
            said=f"{', '.join(codes)}, by the scheduler's Event; figures could not be read",
            codes=tuple(codes),
        )
        for name, codes in sorted(nodes.items())
    )
    reasons = Counter(code for verdict in verdicts for code in verdict.codes)
    return ModelPlacement((), verdicts[:NODES_TOLD], dict(sorted(reasons.items())), total, 0)


def _one_of_each_kind_first(names: Sequence[str], fits: Mapping[str, NodeFit]) -> list[str]:
    """The Nodes in their order, but one of each kind of refusal before the others."""
    kinds: set[tuple[str, ...]] = set()
    firsts: list[str] = []
    for name in names:
        kind = codes_of(fits[name].reason)
        if kind not in kinds:
            kinds.add(kind)
            firsts.append(name)
    chosen = frozenset(firsts)
    return [*firsts, *(name for name in names if name not in chosen)]


def _distance(fit: NodeFit) -> tuple[int, int]:
    """How far a Node is from a fit: first few kinds of reasons, then much free memory."""
    is_closed = not fit.gpus
    free = (gpu.capacity.registered_mib - gpu.load.memory_mib for gpu in fit.gpus)
    return (len(codes_of(fit.reason)) + 100 * is_closed, -max(free, default=0))


def _verdict(
    world: World,
    pod: JsonObject,
    name: str,
    fit: NodeFit,
    requests: Sequence[ContainerRequest | None],
) -> NodeVerdict:
    if fit.groups is not None:
        return NodeVerdict(name, is_fit=True, said="the pod fits")
    request = requests[fit.position] if fit.gpus else None
    gpus: tuple[GpuVerdict, ...] = ()
    if request is not None and fit.refusals:  # else HAMi's scheduler has not looked at any
        steering = world.steering(pod)
        gpus = tuple(
            _gpu(gpu, fit.refusals.get(gpu.capacity.uuid, ""), request, steering)
            for gpu in sorted(fit.gpus, key=lambda gpu: gpu.capacity.index)
        )
    holders = [(-held_mib(one), f"{one.namespace}/{one.name}") for one in world.holders(name)]
    biggest = sorted(holders)[:HOLDERS_TOLD]
    return NodeVerdict(
        name=name,
        is_fit=False,
        reason=fit.reason,
        said=_said(world, pod, name, fit, request),
        codes=codes_of(fit.reason),
        gpus=gpus,
        has_gpus=world.has_gpus(world.nodes[name]),
        biggest=tuple(f"{cap(who, 128)} {mib(-held)}" for held, who in biggest),
    )


def _gpu(gpu: GpuView, reason: str, request: ContainerRequest, steering: Steering) -> GpuVerdict:
    has, used = gpu.capacity, gpu.load
    return GpuVerdict(
        uuid=has.uuid,
        index=has.index,
        model=has.type_name,
        reason=reason,
        said=refused_gpu(reason, gpu, request, steering),
        registered_mib=has.registered_mib,
        promised_mib=used.memory_mib,
        asked_mib=request.memory_on(has.registered_mib),
        core_percent=has.core_percent,
        promised_percent=used.core_percent,
        asked_percent=min(request.core_percent, 100),
        slots=has.split_count,
        used_slots=used.slots,
    )


def _said(
    world: World, pod: JsonObject, name: str, fit: NodeFit, request: ContainerRequest | None
) -> str:
    node = world.nodes[name]
    if refusal := refuse_node(pod, node):
        return refusal
    if fit.reason == UNREGISTERED:
        why = "its kubelet offers 0 slices of nvidia.com/gpu"
        if read_offer(node.annotations, version_of(node)) is None:
            why = "its register annotation is missing or cannot be read"
        if agent := world.agents.get(name):
            why += f"; its agent {cap(agent.name, 128)} is {cap(agent.state, 64)}"
        elif world.agents:  # else agents are no pods in this cluster
            why += "; no pod of the agent is on it"
        return f"unregistered: {why}"
    if fit.reason == "NodeInsufficientDevice" and request is not None:
        gpus = counted(len(fit.gpus), "GPU")
        return f"it has {gpus}, and one container asks for {request.count}"
    return fit.reason


def held_mib(holder: GpuHolder) -> int:
    """The memory of all shares of the pod, in MiB; 0 if they cannot be read."""
    try:
        groups = decode_pod_devices(holder.shares)
    except MalformedText:
        return 0
    return sum(share.memory_mib for group in groups for share in group)


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
    said = f"kube-scheduler places it nowhere, {when(event, now)}: {cap(event.message)}"
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
        told = (f"kube-scheduler, {when(kube, now)}: {cap(kube.message)}",)
        advice = "its message names what is missing besides GPUs"
        return Gate(PLACEMENT, GateVerdict.BLOCKED, said, KUBE_SCHEDULER, advice, told)
    return _somewhere(world, placement, event, now)


def _somewhere(
    world: World, placement: ModelPlacement, event: PodEventView | None, now: dt.datetime
) -> Gate:
    fits = f"it fits on {counted(len(placement.fitting), 'Node')} now"
    first = cap(placement.fitting[0], 128)
    fits += f" ({first})" if len(placement.fitting) == 1 else f" ({first} and others)"
    later = last_event(world, "FilteringSucceed", "BindingFailed")
    has_passed = later and later.last and event and event.last and later.last >= event.last
    if event is None or has_passed:
        return Gate(PLACEMENT, GateVerdict.PASSED, fits)
    told = (f"last attempt {when(event, now)}: {cap(event.message)}",)
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
    told = (f"last attempt {when(event, now)}: {cap(event.message)}",) if event else ()
    if placement.without_gpus:
        told = (*told, f"not counted: {counted(placement.without_gpus, 'Node')} without GPUs")
    if not placement.refused:
        said = "no Node of the cluster reports GPUs to HAMi's scheduler"
        advice = ADVICE["NodeUnregistered"]
        return Gate(PLACEMENT, GateVerdict.BLOCKED, said, "NodeUnregistered", advice, told)
    said = f"none of {placement.refused:,} Nodes with GPUs fits"
    if placement.refused == 1:
        said = "the only Node with GPUs does not fit"
    # The reason of most Nodes; among equals, that of most GPUs of the nearest Node. That too few
    # GPUs fit follows from the reasons of the others, if there are others.
    gpus = Counter(gpu.reason for node in placement.nodes[:1] for gpu in node.gpus)
    reason = max(
        placement.reasons,
        key=lambda code: (code not in _DERIVED, placement.reasons[code], gpus[code]),
        default="",
    )
    if reason == "CardInsufficientMemory" and placement.is_oversized:
        told = (*told, "no GPU of the cluster has so much memory, even without other pods")
    return Gate(PLACEMENT, GateVerdict.BLOCKED, said, reason, ADVICE.get(reason, ""), told)


def is_mixed(placement: ModelPlacement) -> bool:
    """Whether the Nodes have several reasons, of which none follows from the others."""
    return len(placement.reasons.keys() - _DERIVED) > 1


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
