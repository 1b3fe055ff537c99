"""The gate of placement: the cluster, the model's answer for each Node, and the last attempt."""

import contextlib
import dataclasses
import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from agent import cluster as annotations
from agent.allocate.room import ContainerRequest
from agent.cluster import PodView, Requirement
from agent.errors import MalformedText, cap
from agent.hami.annotations import RegisteredGpu, decode_pod_devices
from agent.kit.units import by_number, counted, gib, percent, span
from agent.kube.objects import decode_moment, decode_pod
from agent.kube.reader import ClusterNode, ClusterSnapshot, JsonObject, ListedPod, Taint
from agent.sandbox.explain import story
from agent.sandbox.explain.story import NODE_UNREGISTERED, TEXT, Gate, GateVerdict, GpuVerdict, when
from agent.sandbox.scheduler import model
from agent.sandbox.scheduler.filter import NodeFit, fit_pod, wishes_of
from agent.sandbox.scheduler.model import GpuView, RegisteredNode, SchedulerSettings, Steering
from agent.sandbox.scheduler.registry import TERMINAL, Quotas, Reservation, Usage, read_offer
from agent.sandbox.store import Json
from agent.web.runbook import entries

# The cluster of a snapshot, as HAMi's scheduler would see it now.
#
# It runs the scheduler's model. Its flags are not in any object that can be read, so HAMi's
# defaults are assumed. Before that, each Node is held to what kube-scheduler itself asks of it.

UNSCHEDULABLE: Final = Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")
_OPERATORS: Final = frozenset({"In", "NotIn", "Exists", "DoesNotExist"})
UNREGISTERED: Final = "node unregistered"
UNJUDGED: Final = "not judged"
MODELLED: Final = frozenset({"", "hami-core"})
"""The modes of GPUs that the model covers. It has no profiles of MIG and no servers of MPS."""


def refuse_node(spec: JsonObject, node: ClusterNode) -> str:
    """Why kube-scheduler does not offer the Node for a pod of this spec; empty if it does."""
    tolerations = spec.get("tolerations") or ()
    if node.is_closed and not _is_tolerated(UNSCHEDULABLE, tolerations):
        return "the Node is cordoned (kubectl cordon)"
    for taint in node.taints:
        if taint.effect in ("NoSchedule", "NoExecute") and not _is_tolerated(taint, tolerations):
            return f"the pod does not tolerate the taint {taint.key}={taint.value}:{taint.effect}"
    for key, value in (spec.get("nodeSelector") or {}).items():
        if node.labels.get(key) != value:
            return f"the pod's nodeSelector wants the label {key}={value}"
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = (required or {}).get("nodeSelectorTerms") or ()
    if required is not None and not any(_matches(term, node) for term in terms):
        return "the pod's required nodeAffinity does not match its labels"
    return ""


def _is_tolerated(taint: Taint, tolerations: Iterable[Mapping[str, Any]]) -> bool:
    for one in tolerations:
        exists, key = one.get("operator") == "Exists", one.get("key") or ""
        if one.get("effect") not in (None, "", taint.effect) or key not in ("", taint.key):
            continue
        if exists or (key and (one.get("value") or "") == taint.value):
            return True
    return False


def _matches(term: Mapping[str, Any], node: ClusterNode) -> bool:
    """Whether all rules of the term hold. A term without rules matches nothing."""
    rules = [(rule, node.labels) for rule in term.get("matchExpressions") or ()]
    rules += [(rule, {"metadata.name": node.name}) for rule in term.get("matchFields") or ()]
    return bool(rules) and all(_holds(rule, values) for rule, values in rules)


def _holds(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, wanted, word = rule.get("key") or "", tuple(rule.get("values") or ()), rule.get("operator")
    if word in {"Gt", "Lt"}:
        try:
            label, bound = map(int, (labels.get(key, ""), *wanted))
        except ValueError:  # kube-scheduler, too, takes no other text as a number
            return False
        return label > bound if word == "Gt" else label < bound
    return word in _OPERATORS and Requirement(key, wanted, word in ("In", "Exists")).holds(labels)


class World:
    """The pod, the Nodes, the use of their GPUs and the quotas. The pod itself counts nowhere."""

    def __init__(
        self, snapshot: ClusterSnapshot, now: dt.datetime, settings: SchedulerSettings
    ) -> None:
        self.snapshot, self.now, self.settings = snapshot, now, settings
        self.pod = pod = dict(snapshot.pod)
        self.metadata, self.spec, self.status = pod["metadata"], pod["spec"], pod["status"]
        self.noted: Mapping[str, str] = self.metadata.get("annotations") or {}
        self.namespace = str(self.metadata.get("namespace", ""))
        self.phase = str(self.status.get("phase") or "Pending")
        self.node = str(self.spec.get("nodeName") or "")
        self.steering = model.read_steering(self.noted, settings)
        self.attempt = story.last_attempt(snapshot)
        self.view: PodView | None = None
        with contextlib.suppress(MalformedText):  # a pod without a name or UID holds nothing
            self.view = decode_pod(pod, model.COUNT)
        groups = (self.view and self.view.groups) or ()
        self.gpus = list(dict.fromkeys(share.uuid for group in groups for share in group))
        self.nodes = {node.name: node for node in snapshot.nodes}
        self.holders: defaultdict[str, list[ListedPod]] = defaultdict(list)
        """By Node, the pods that hold GPUs."""
        for holder in snapshot.holders:
            if holder.uid != self.metadata.get("uid", "") and holder.phase not in TERMINAL:
                self.holders[holder.chosen].append(holder)
        everyone = (holder for holders in self.holders.values() for holder in holders)
        self.neighbours = [one for one in everyone if one.namespace == self.namespace]
        self.held = usage_of(self.neighbours)
        """What the other pods of the namespace hold."""
        self.offers = {
            name: read_offer(node.annotations, is_json=False) for name, node in self.nodes.items()
        }
        gpus = (view.capacity for offer in self.offers.values() if offer for view in offer.gpus)
        self.greatest_mib = max(
            (g.registered_mib for g in gpus if self.steering.admits(g)), default=0
        )
        """The memory of the greatest GPU that the pod itself does not exclude."""

    def changed(self, **changes: object) -> "World":
        """The world with other parts of its snapshot."""
        return World(msgspec.structs.replace(self.snapshot, **changes), self.now, self.settings)

    def containers(self) -> Iterator[tuple[str, Json, ContainerRequest | None]]:
        """Name, object and request of each container; no request: HAMi sees none."""
        for one in model.all_containers(self.pod):
            request = model.container_request(one, self.settings)
            yield cap(str(one.get("name", "")), 64), one, request

    def reported(self, name: str) -> list[RegisteredGpu]:
        """The GPUs that the Node reports."""
        offer = self.offers.get(name)
        return [view.capacity for view in offer.gpus] if offer else []

    def registered(self, name: str) -> RegisteredNode | None:
        """The Node as the scheduler has it registered; None if it has not."""
        offer = self.offers.get(name)
        if offer is None or not offer.gpus or self.nodes[name].slices <= 0:
            return None  # HAMi drops a node whose kubelet offers nothing
        return offer.with_loads(usage_of(self.holders.get(name, ())).loads(name))

    def trial(self) -> Callable[[str], NodeFit]:
        """What tries the pod on a Node, by the model."""
        quotas = Quotas(self.held, self.settings.rules.memory_factor)
        for quota in self.snapshot.quotas:
            quotas.see("ADDED", dict(quota))
        wishes = wishes_of(self.pod, self.settings, quotas if self.snapshot.quotas else None)

        def fit(name: str) -> NodeFit:
            if refusal := refuse_node(self.spec, self.nodes[name]):
                return NodeFit(None, refusal)
            if (state := self.registered(name)) is None:
                return NodeFit(None, UNREGISTERED)
            modelled = tuple(gpu for gpu in state.gpus if gpu.capacity.mode in MODELLED)
            found = fit_pod(dataclasses.replace(state, gpus=modelled), wishes)
            if found.groups is None and len(modelled) < len(state.gpus):
                return NodeFit(None, UNJUDGED)
            return found

        return fit


def has_gpus(node: ClusterNode) -> bool:
    """Whether the Node has, or had, something of GPUs."""
    keys = (annotations.REGISTER, annotations.HANDSHAKE)
    return node.slices > 0 or any(key in node.annotations for key in keys)


def usage_of(holders: Iterable[ListedPod]) -> Usage:
    """What the pods hold, as HAMi counts it."""
    usage = Usage()
    for one in holders:
        with contextlib.suppress(MalformedText):  # HAMi counts no pod that it cannot read
            groups = decode_pod_devices(one.shares)
            held = Reservation(one.chosen, groups, one.inits, one.has_passed_init, one.namespace)
            usage.reserve(one.uid, held)
    return usage


def held_by(holder: ListedPod) -> model.Load:
    """What one pod holds on all GPUs."""
    return usage_of([holder]).held(holder.namespace)


# What the schedulers said last, beside the model's answer for each Node.

PLACEMENT: Final = "placement"
NODES_TOLD: Final = 20
HOLDERS_TOLD: Final = 3
KUBE_SCHEDULER: Final = "E-NODE"
NOT_JUDGED: Final = "E-UNJUDGED"
UNTRIED: Final = 60.0
"""Seconds. A scheduler tries a new pod within seconds."""
RETRY_HOW: Final = (
    "HAMi's scheduler reads the Nodes every 15 s, and kube-scheduler tries such a pod again after "
    "at most 5 min, or now if you change the pod (kubectl label pod); else restart HAMi's scheduler"
)
ADVICE: Final = {
    "CardNotHealth": "`hami-agent status --node {node}` says what the GPU has and what to do",
    "CardCordoned": "if the work on the GPU is done: `hami-agent uncordon GPU --node {node}`",
    "CardTypeMismatch": "compare the pod's use-gputype, nouse-gputype and vgpu-mode with the GPUs",
    "CardUuidMismatch": "compare the pod's use-gpuuuid and nouse-gpuuuid with the GPUs",
    NODE_UNREGISTERED: "`hami-agent status --node {node}` says why; else look at its agent's pod",
    KUBE_SCHEDULER: "compare what the pod's spec asks of a Node with the Nodes",
}
"""Where to look. A change is advised only if the scheduler's model has verified it."""
_FOREIGN: Final = (
    *("Insufficient ", "didn't ", "untolerated taint", "volume", "free ports", "Too many pods"),
)
_OF_CORES: Final = frozenset(
    {"CardInsufficientCore", "CardComputeUnitsExhausted", "ExclusiveDeviceAllocateConflict"}
)
_DERIVED: Final = frozenset({"AllocatedCardsInsufficientRequest", "NumaNotFit"})
"""That too few GPUs fit follows from the reasons of the others, if there are others."""


class PodPlacement(msgspec.Struct, frozen=True):
    """The model's answer for all Nodes with GPUs, by name.

    - `reason`: that of most GPUs; `reasons`: Nodes by reason.
    - `nodes`: the Nodes nearest to a fit, at most NODES_TOLD.
    """

    fits: Mapping[str, NodeFit]
    reason: str
    reasons: Mapping[str, int]
    nodes: tuple[story.NodeVerdict, ...]

    @property
    def fitting(self) -> list[str]:
        """The Nodes on which the pod fits."""
        return [name for name, fit in self.fits.items() if fit.groups is not None]

    @property
    def is_judged(self) -> bool:
        """Whether the model covers the Nodes that have GPUs."""
        return NOT_JUDGED not in self.reasons


def place(world: World) -> PodPlacement:
    """Try the pod on every Node with GPUs."""
    fit, steering = world.trial(), world.steering
    names = sorted((name for name, node in world.nodes.items() if has_gpus(node)), key=by_number)
    fits = {name: fit(name) for name in names}
    refused = {name: found for name, found in fits.items() if found.groups is None}
    reasons: Counter[str] = Counter()
    for found in refused.values():
        # Of the GPUs that the pod itself does not exclude, if there is one: it is about them.
        wanted = (gpu.capacity for gpu in found.gpus)
        uuids = [gpu.uuid for gpu in wanted if steering.admits(gpu)]
        told_of = [found.refusals[uuid] for uuid in uuids if uuid in found.refusals]
        reasons.update(told_of or codes_of(found.reason))
    by_reason = Counter(code for found in refused.values() for code in codes_of(found.reason))
    fitting = [name for name in names if name not in refused]

    def distance(name: str) -> tuple[int, int]:
        """How far a Node is from a fit: first few kinds of reasons, then much free memory."""
        fit = refused[name]
        free = max((gpu.free_mib for gpu in fit.gpus), default=0)
        return len(codes_of(fit.reason)) + 100 * (not fit.gpus), -free

    told = [*fitting, *sorted(refused, key=distance)][:NODES_TOLD]
    verdicts = tuple(_verdict(world, name, fits[name]) for name in told)
    return PodPlacement(fits, _main_reason(reasons), dict(sorted(by_reason.items())), verdicts)


def _main_reason(counts: Mapping[str, int]) -> str:
    """The reason with the greatest count, as an id of the runbook."""
    codes = sorted(counts, key=lambda code: (code in _DERIVED, -counts[code], code))
    reason = next(iter(codes), KUBE_SCHEDULER)
    # A word of the scheduler that the runbook does not have stands as it was said.
    return reason if reason in entries() else NOT_JUDGED


def codes_of(reason: str) -> tuple[str, ...]:
    """The runbook's ids for the scheduler's text about one Node."""
    if own := {UNREGISTERED: NODE_UNREGISTERED, UNJUDGED: NOT_JUDGED}.get(reason):
        return (own,)
    words = [token.rpartition(" ")[2] for token in reason.split(", ")]
    return tuple(words) if all(word in entries() for word in words) else (KUBE_SCHEDULER,)


def placement_gate(world: World, placement: PodPlacement | None) -> Gate:
    """The gate of a pod without a Node. `placement`: None if the model could not be run."""
    attempt, fitting = world.attempt, placement.fitting if placement else []
    told, fits = (attempt.said(world.now),) if attempt else (), ""
    if fitting:
        also = "" if len(fitting) == 1 else " and others"
        fits = f"it fits on {counted(len(fitting), 'Node')} now ({cap(fitting[0], 128)}{also})"
    if attempt is not None and attempt.stage is story.AttemptStage.ERROR:
        said = f"the scheduler failed, {when(attempt.at, world.now)}: {cap(attempt.text, TEXT)}"
        advice = "do what it says of the pod, or look at HAMi's scheduler: pod, Service and log"
        facts = (f"by what the Nodes report, {fits}",) if fits else ()
        return Gate(PLACEMENT, GateVerdict.BLOCKED, said, "E-ERROR", advice, facts)
    if placement is not None and not fitting and placement.is_judged:
        return _nowhere(world, placement, told)
    if attempt is None:
        return _untried(world, fits)
    if attempt.stage is story.AttemptStage.CHOSEN:
        said = fits or "the scheduler chose a Node, by its Event"
        return Gate(PLACEMENT, GateVerdict.PASSED, said)
    if fitting:
        return _refused(len(fitting), fits, attempt.text, told)
    said = "the scheduler places it nowhere; "
    said += "GPUs in MIG or MPS mode are not judged" if placement else "Nodes cannot be read"
    told = (*told, cap(attempt.named, TEXT)) if attempt.named != attempt.text else told
    reason = _main_reason(attempt.reasons)
    return Gate(PLACEMENT, GateVerdict.BLOCKED, said, reason, _advice(reason, placement), told)


def _refused(fitting: int, fits: str, text: str, facts: tuple[str, ...]) -> Gate:
    """The gate of a pod that fits by what the Nodes report, and that was refused last."""
    # The reasons of kube-scheduler's message that are its own rules, not HAMi's answer.
    parts = text.partition(":")[2].partition("preemption:")[0].split(", ")
    foreign = [part.strip().rstrip(".") for part in parts if any(m in part for m in _FOREIGN)]
    if not foreign:
        said = f"{fits}; the scheduler has not tried since, or uses an older report"
        return Gate(PLACEMENT, GateVerdict.WAITING, said, "E-RETRY", RETRY_HOW, facts)
    nodes = counted(fitting, "Node")
    said = f"HAMi's rules allow {nodes}, but kube-scheduler's own rules allow none"
    advice = "its message names what is missing besides GPUs"
    if slices := [reason for reason in foreign if "Insufficient nvidia.com/" in reason]:
        said = f"{fits}, but the Nodes that were tried offered too few slices ({slices[0]})"
        advice = "compare `kubectl describe node` (Allocated resources) with what the pod asks for:"
        advice += " kube-scheduler itself counts the slices"
    return Gate(PLACEMENT, GateVerdict.BLOCKED, said, KUBE_SCHEDULER, advice, facts)


def _untried(world: World, fits: str) -> Gate:
    """No scheduler has said a word about the pod."""
    also = f"; by what the Nodes report, {fits}" if fits else ""
    if not world.snapshot.has("events"):
        said = f"the pod's Events could not be read, so no attempt to place it is known{also}"
        return Gate(PLACEMENT, GateVerdict.UNKNOWN, said)
    born = decode_moment(world.metadata.get("creationTimestamp")) or world.now
    age = (world.now - born).total_seconds()
    if age < UNTRIED:
        said = f"no scheduler has said anything about the pod yet{also}"
        return Gate(PLACEMENT, GateVerdict.WAITING, said, "E-UNTRIED")
    said = f"no scheduler has said anything about the pod in {span(age)}{also}"
    name = cap(world.spec.get("schedulerName") or "default-scheduler", 64)
    advice = f"look whether the scheduler {name} runs: its pods, its leader, its log"
    return Gate(PLACEMENT, GateVerdict.BLOCKED, said, "E-UNTRIED", advice)


def chosen_gate(world: World, cause: str, *, asks: bool) -> Gate:
    """The gate of a pod that has a Node. `cause`: the id of what admission says."""
    node = cap(world.node, 128)
    if not asks:
        return Gate(PLACEMENT, GateVerdict.PASSED, f"it is on {node}")
    if annotations.VGPU_NODE in world.noted:
        return Gate(PLACEMENT, GateVerdict.PASSED, f"HAMi's scheduler chose {node}")
    said = f"the pod is on {node}, and HAMi's scheduler chose no GPUs for it"
    # Where HAMi drops the request, its scheduler did see the pod.
    reason = cause if cause == "E-REQUEST" else "E-SCHEDULER"
    return Gate(PLACEMENT, GateVerdict.NOTED, said, reason)


def foreign_gate(world: World) -> Gate:
    """The gate of a pod that kube-scheduler places alone."""
    if (attempt := world.attempt) is None:
        return _untried(world, "")
    said = f"kube-scheduler places it nowhere, {when(attempt.at, world.now)}: "
    said += cap(attempt.text, TEXT)
    return Gate(PLACEMENT, GateVerdict.BLOCKED, said, KUBE_SCHEDULER, ADVICE[KUBE_SCHEDULER])


def _nowhere(world: World, placement: PodPlacement, facts: tuple[str, ...]) -> Gate:
    if bare := sum(not has_gpus(node) for node in world.nodes.values()):
        facts = (*facts, f"not counted: {counted(bare, 'Node')} without GPUs")
    reason, said = placement.reason, f"none of {len(placement.fits):,} Nodes with GPUs fits"
    if len(placement.fits) == 1:
        said = "the only Node with GPUs does not fit"
    if not placement.fits:
        reason, said = NODE_UNREGISTERED, "no Node of the cluster reports GPUs to HAMi's scheduler"
    asked = [request.memory_mib for *_, request in world.containers() if request]
    if max(asked, default=0) > world.greatest_mib > 0:
        # Whatever else keeps it out, such as an unhealthy GPU: without that it still fits nowhere.
        reason = "CardInsufficientMemory"
        said += ": no GPU that the pod may use has so much memory, healthy or not"
    return Gate(PLACEMENT, GateVerdict.BLOCKED, said, reason, _advice(reason, placement), facts)


def _advice(reason: str, placement: PodPlacement | None) -> str:
    """Where to look, with the nearest Node of that reason."""
    nodes = placement.nodes if placement else ()
    name = next((cap(node.name, 128) for node in nodes if reason in node.codes), "NODE")
    return ADVICE.get(reason, "").format(node=name)


# Nodes and GPUs with the figures.


def _verdict(world: World, name: str, fit: NodeFit) -> story.NodeVerdict:
    if fit.groups is not None:
        return story.NodeVerdict(name, is_fit=True, said="the pod fits")
    request = [request for *_, request in world.containers()][fit.position] if fit.gpus else None
    codes, steering, gpus = codes_of(fit.reason), world.steering, []
    if request is not None and fit.refusals:  # else HAMi's scheduler has not looked at any
        for gpu in sorted(fit.gpus, key=lambda gpu: gpu.capacity.index):
            reason = fit.refusals.get(gpu.capacity.uuid, "")
            gpus.append(_gpu(gpu, reason, request, steering))
    reasons = {gpu.reason for gpu in gpus}
    of_cores = not _OF_CORES.isdisjoint(reasons) and "CardInsufficientMemory" not in codes
    holders = []
    for holder in world.holders.get(name, ()):
        load, title = held_by(holder), cap(f"{holder.namespace}/{holder.name}", 128)
        amount = load.core_percent if of_cores else load.memory_mib
        holders.append((-amount, f"{title} {percent(amount) if of_cores else gib(amount)}"))
    node = world.nodes[name]
    said = refuse_node(world.spec, node) or fit.reason
    if fit.reason == UNREGISTERED:
        said = "unregistered: its kubelet offers 0 slices of nvidia.com/gpu"
        if world.offers[name] is None:
            said = "unregistered: its register annotation is missing or cannot be read"
    elif fit.reason == "NodeInsufficientDevice" and request is not None:
        said = f"it has {counted(len(fit.gpus), 'GPU')}, and one container asks for {request.count}"
    return story.NodeVerdict(
        name=name,
        is_fit=False,
        reason=fit.reason,
        said=said,
        codes=codes,
        gpus=tuple(gpus),
        biggest=tuple(text for amount, text in sorted(holders)[:HOLDERS_TOLD] if amount),
        events=story.agent_words(world.snapshot.node_events, world.now, name),
    )


def _gpu(gpu: GpuView, reason: str, request: ContainerRequest, steering: Steering) -> GpuVerdict:
    has, used = gpu.capacity, gpu.load
    types = _wanted(steering.use_types, steering.avoid_types, steering.mode)
    said = {
        "CardTypeMismatch": f"{cap(has.type_name, 64)} found, {types}",
        "CardUuidMismatch": _wanted(steering.use_uuids, steering.avoid_uuids, None),
        "NumaNotFit": f"it fits, but too few GPUs of NUMA node {has.numa} do (numa-bind)",
        "AllocatedCardsInsufficientRequest": f"it fits, but {request.count} are asked for",
    }
    return GpuVerdict(
        *(has.uuid, has.index, has.type_name, reason, said.get(reason, "")),
        *(has.registered_mib, used.memory_mib, request.memory_on(has.registered_mib)),
        *(has.core_percent, used.core_percent, request.cores),
        *(has.split_count, used.slots),
    )


_Words = tuple[str, ...] | None


def _wanted(use: _Words, avoid: _Words, mode: str | None) -> str:
    parts = [(use, "wanted"), (avoid, "excluded")]
    told = [f"{cap(' or '.join(w), 128) or 'none'} {verb}" for w, verb in parts if w is not None]
    told += [] if mode is None else [f"mode {cap(mode, 64)} wanted"]
    return ", ".join(told) or "another wanted"
