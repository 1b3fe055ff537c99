"""The cluster of a snapshot, as HAMi's scheduler would see it now.

It runs the scheduler's model. Its flags are not in any object that can be read, so HAMi's defaults
are assumed. Before that, each Node is held to what kube-scheduler itself asks of it.
"""

import contextlib
import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from agent import cluster as annotations
from agent.cluster import PodView
from agent.errors import MalformedText
from agent.hami.pod import decode_pod_devices
from agent.kube.objects import decode_pod
from agent.kube.reader import ClusterNode, ClusterSnapshot, GpuHolder, JsonObject, Taint
from agent.sandbox.scheduler.filter import NodeFit, Wishes, fit_pod
from agent.sandbox.scheduler.model import (
    COUNT,
    Load,
    RegisteredNode,
    SchedulerSettings,
    Steering,
    init_count,
    pod_requests,
    read_steering,
)
from agent.sandbox.scheduler.registry import read_offer
from agent.sandbox.scheduler.usage import TERMINAL, Quotas, Reservation, Usage

_UNSCHEDULABLE: Final = "node.kubernetes.io/unschedulable"
_EFFECTS: Final = frozenset({"NoSchedule", "NoExecute"})
UNREGISTERED: Final = "node unregistered"
UNJUDGED: Final = "not judged"
MODELLED: Final = frozenset({"", "hami-core"})
"""The modes of GPUs that the model covers. It has no profiles of MIG and no servers of MPS."""


def refuse_node(pod: JsonObject, node: ClusterNode) -> str:
    """Why kube-scheduler does not offer the Node for this pod; empty if it does."""
    spec = pod["spec"]
    tolerations = spec.get("tolerations") or ()
    closed = Taint(_UNSCHEDULABLE, "", "NoSchedule")
    if node.is_closed and not _is_tolerated(closed, tolerations):
        return "the Node is cordoned (kubectl cordon)"
    for taint in node.taints:
        if taint.effect in _EFFECTS and not _is_tolerated(taint, tolerations):
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
    for toleration in tolerations:
        if toleration.get("effect") not in (None, "", taint.effect):
            continue
        exists, key = toleration.get("operator") == "Exists", toleration.get("key") or ""
        if key and key != taint.key:
            continue
        if exists or (key and (toleration.get("value") or "") == taint.value):
            return True
    return False


def _matches(term: Mapping[str, Any], node: ClusterNode) -> bool:
    """Whether all rules of the term hold. A term without rules matches nothing."""
    labels = [(rule, node.labels) for rule in term.get("matchExpressions") or ()]
    fields = [(rule, {"metadata.name": node.name}) for rule in term.get("matchFields") or ()]
    rules = [*labels, *fields]
    return bool(rules) and all(_holds(rule, values) for rule, values in rules)


def _holds(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(rule.get("key") or "")
    wanted: Sequence[str] = rule.get("values") or ()
    operator = str(rule.get("operator"))
    if operator in ("Gt", "Lt"):
        try:
            (bound,) = wanted
            number, limit = int(value or ""), int(bound)
        except ValueError:  # kube-scheduler, too, takes no other text as a number
            return False
        return number > limit if operator == "Gt" else number < limit
    answers = {
        "In": value is not None and value in wanted,
        "NotIn": value is None or value not in wanted,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }
    return answers.get(operator, False)


class Edit(msgspec.Struct, frozen=True):
    """A change of the cluster that is tried: what it opens, and whose shares it ignores.

    `quotas`: those of the namespace in place of the present ones.
    """

    opened: frozenset[str] = frozenset()
    uncordoned: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    quotas: tuple[JsonObject, ...] | None = None


NO_EDIT: Final = Edit()


class World:
    """Nodes, the use of their GPUs and the quotas. The pod itself counts nowhere."""

    def __init__(self, snapshot: ClusterSnapshot, settings: SchedulerSettings) -> None:
        self.snapshot = snapshot
        self.settings = settings
        metadata = snapshot.pod["metadata"]
        self.view: PodView | None = None
        with contextlib.suppress(MalformedText):  # a pod without a name or UID holds nothing
            self.view = decode_pod(snapshot.pod, COUNT)
        self.namespace = str(metadata.get("namespace", ""))
        self.nodes = {node.name: node for node in snapshot.nodes}
        self.holders: defaultdict[str, list[GpuHolder]] = defaultdict(list)
        """By Node, the pods that hold GPUs."""
        for holder in snapshot.holders:
            if holder.uid != metadata.get("uid", "") and holder.phase not in TERMINAL:
                self.holders[holder.node].append(holder)
        self.neighbours = [
            holder
            for holders in self.holders.values()
            for holder in holders
            if holder.namespace == self.namespace
        ]
        self.held = usage_of(self.neighbours)
        """What the other pods of the namespace hold."""
        self.offers = {
            name: read_offer(node.annotations, None) for name, node in self.nodes.items()
        }

    @property
    def is_complete(self) -> bool:
        """Whether the model can be run: Nodes and pods are known."""
        return self.snapshot.has("nodes") and self.snapshot.has("pods")

    def registered(self, name: str, edit: Edit = NO_EDIT) -> RegisteredNode | None:
        """The Node as the scheduler has it registered; None if it has not."""
        offer = self.offers.get(name)
        if offer is None or not offer.gpus or self.nodes[name].slices <= 0:
            return None  # HAMi drops a node whose kubelet offers nothing
        offer = dataclasses.replace(offer, cordoned=offer.cordoned - edit.uncordoned)
        usage = usage_of(one for one in self.holders.get(name, ()) if one.uid not in edit.ended)
        return offer.state(name, usage.loads(name))

    def trial(self, pod: JsonObject, edit: Edit = NO_EDIT) -> Callable[[str], NodeFit]:
        """What tries the pod on a Node, by the model. Raises BadWeightsError."""
        plain, quotas = dict(pod), self.snapshot.quotas if edit.quotas is None else edit.quotas
        wishes = Wishes(pod_requests(plain, self.settings), init_count(plain), self.steering(pod))
        if quotas:
            limits = Quotas(self.held, self.settings.memory_factor)
            for quota in quotas:
                limits.see("ADDED", dict(quota))
            fits_quota = functools.partial(limits.fits, self.namespace)
            wishes = dataclasses.replace(wishes, fits_quota=fits_quota)

        def fit(name: str) -> NodeFit:
            node = self.nodes[name]
            if name in edit.opened:
                taints = tuple(taint for taint in node.taints if taint.key != _UNSCHEDULABLE)
                node = msgspec.structs.replace(node, is_closed=False, taints=taints)
            if refusal := refuse_node(pod, node):
                return NodeFit(None, refusal)
            if (state := self.registered(name, edit)) is None:
                return NodeFit(None, UNREGISTERED)
            modelled = tuple(gpu for gpu in state.gpus if gpu.capacity.mode in MODELLED)
            found = fit_pod(dataclasses.replace(state, gpus=modelled), wishes)
            if found.groups is None and len(modelled) < len(state.gpus):
                return NodeFit(None, UNJUDGED)
            return found

        return fit

    def steering(self, pod: JsonObject) -> Steering:
        """The pod's constraints. Raises BadWeightsError."""
        return read_steering(pod["metadata"].get("annotations") or {}, self.settings)


def has_gpus(node: ClusterNode) -> bool:
    """Whether the Node has, or had, something of GPUs."""
    keys = (annotations.REGISTER, annotations.HANDSHAKE)
    return node.slices > 0 or any(key in node.annotations for key in keys)


def usage_of(holders: Iterable[GpuHolder]) -> Usage:
    """What the pods hold, as HAMi counts it."""
    usage = Usage()
    for one in holders:
        with contextlib.suppress(MalformedText):  # HAMi counts no pod that it cannot read
            groups = decode_pod_devices(one.shares)
            held = Reservation(one.node, groups, one.inits, one.has_passed_init, one.namespace)
            usage.reserve(one.uid, held)
    return usage


def held_by(holder: GpuHolder) -> Load:
    """What one pod holds on all GPUs."""
    return usage_of([holder]).held(holder.namespace)


def by_number(name: str) -> tuple[tuple[int, str], ...]:
    """The order of names of Nodes: gpu-2 is before gpu-10."""
    parts = re.findall(r"(\d+)|(\D+)", name)
    return tuple((int(digits or 0), text) for digits, text in parts)
