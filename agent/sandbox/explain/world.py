"""The cluster of a snapshot, as HAMi's scheduler would see it now.

It runs the scheduler's model. Its flags are not in any object that can be read, so HAMi's defaults
are assumed. Before that, each Node is held to what kube-scheduler itself asks of it.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from agent import cluster as annotations
from agent.hami.register import SHORT, is_json_form
from agent.kube.reader import ClusterNode, ClusterSnapshot, GpuHolder, JsonObject, Taint
from agent.sandbox.scheduler.filter import NodeFit, Wishes, fit_pod
from agent.sandbox.scheduler.model import RegisteredNode, SchedulerSettings
from agent.sandbox.scheduler.registry import Version, read_offer
from agent.sandbox.scheduler.requests import Steering, init_count, pod_requests, read_steering
from agent.sandbox.scheduler.usage import TERMINAL, Quotas, Usage

_UNSCHEDULABLE: Final = "node.kubernetes.io/unschedulable"
_EFFECTS: Final = frozenset({"NoSchedule", "NoExecute"})
UNREGISTERED: Final = "node unregistered"


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
    """A change of the cluster that is tried: what it opens, and whose shares it ignores."""

    opened: frozenset[str] = frozenset()
    uncordoned: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    without_quotas: bool = False


NO_EDIT: Final = Edit()


class World:
    """Nodes, the use of their GPUs and the quotas. The pod itself counts nowhere."""

    def __init__(self, snapshot: ClusterSnapshot, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.snapshot = snapshot
        self.nodes = {node.name: node for node in snapshot.nodes}
        self._holders: defaultdict[str, list[GpuHolder]] = defaultdict(list)
        self.by_name: dict[tuple[str, str], GpuHolder] = {}
        own = snapshot.pod["metadata"].get("uid", "")
        namespace = snapshot.pod["metadata"].get("namespace", "")
        neighbours = Usage()
        for holder in snapshot.holders:
            self.by_name[holder.namespace, holder.name] = holder
            if holder.uid == own or holder.phase in TERMINAL:
                continue
            self._holders[holder.node].append(holder)
            if holder.namespace == namespace:
                _count(neighbours, holder)
        self.neighbours = neighbours
        self.quotas = Quotas(neighbours, settings.memory_factor)
        for quota in snapshot.quotas:
            self.quotas.see("ADDED", dict(quota))
        self.agents = {agent.node: agent for agent in snapshot.agents}
        self._registered: dict[tuple[str, Edit], RegisteredNode | None] = {}
        self._fits: dict[str, NodeFit] = {}
        """The fits of the pod itself in the cluster as it is."""
        self._wishes: tuple[JsonObject, Edit, Wishes] | None = None
        """Those that were made last: one pod is tried on many Nodes."""

    def holders(self, node: str) -> tuple[GpuHolder, ...]:
        """The pods that hold GPUs of the Node."""
        return tuple(self._holders.get(node, ()))

    def registered(self, name: str, edit: Edit = NO_EDIT) -> RegisteredNode | None:
        """The Node as the scheduler has it registered; None if it has not."""
        key = (name, edit)
        if key not in self._registered:
            node = self.nodes[name]
            offer = read_offer(node.annotations, version_of(node))
            if node.slices <= 0 or offer is None or not offer.gpus:
                self._registered[key] = None  # HAMi drops a node whose kubelet offers nothing
            else:
                usage = Usage()
                for holder in self._holders.get(name, ()):
                    if holder.uid not in edit.ended:
                        _count(usage, holder)
                offer = dataclasses.replace(offer, cordoned=offer.cordoned - edit.uncordoned)
                self._registered[key] = offer.state(name, usage.loads(name))
        return self._registered[key]

    def fit(self, pod: JsonObject, name: str, edit: Edit = NO_EDIT) -> NodeFit:
        """Whether the pod fits on the Node, by the model. Raises BadWeightsError."""
        is_plain = pod is self.snapshot.pod and edit == NO_EDIT
        if is_plain and name in self._fits:
            return self._fits[name]
        refusal = "" if name in edit.opened else refuse_node(pod, self.nodes[name])
        if refusal:
            fit = NodeFit(None, refusal)
        elif (state := self.registered(name, edit)) is None:
            fit = NodeFit(None, UNREGISTERED)
        else:
            fit = fit_pod(state, self._wished(pod, edit))
        if is_plain:
            self._fits[name] = fit
        return fit

    def _wished(self, pod: JsonObject, edit: Edit) -> Wishes:
        """The pod's requests, as the model takes them. Raises BadWeightsError."""
        if self._wishes is not None and self._wishes[0] is pod and self._wishes[1] == edit:
            return self._wishes[2]
        held = dict(pod)
        wishes = Wishes(pod_requests(held, self.settings), init_count(held), self.steering(pod))
        if self.snapshot.quotas and not edit.without_quotas:
            namespace = pod["metadata"].get("namespace", "")
            fits = functools.partial(self.quotas.fits, namespace)
            wishes = dataclasses.replace(wishes, fits_quota=fits)
        self._wishes = (pod, edit, wishes)
        return wishes

    def steering(self, pod: JsonObject) -> Steering:
        """The pod's constraints. Raises BadWeightsError."""
        return read_steering(pod["metadata"].get("annotations") or {}, self.settings)

    def has_gpus(self, node: ClusterNode) -> bool:
        """Whether the Node has, or had, something of GPUs."""
        keys = (annotations.REGISTER, annotations.HANDSHAKE)
        return node.slices > 0 or any(key in node.annotations for key in keys)


def version_of(node: ClusterNode) -> Version:
    """The newest release of the scheduler that reads the form of the Node's report."""
    text = node.annotations.get(annotations.REGISTER, "")
    if is_json_form(text):
        return Version.V2_10
    records = [record for record in text.split(":") if record]
    is_short = bool(records) and all(record.count(",") + 1 == SHORT for record in records)
    return Version.V2_4 if is_short else Version.V2_7


def _count(usage: Usage, holder: GpuHolder) -> None:
    """Count the holder as HAMi does: when first seen, and again when it has passed its inits."""
    ended: Mapping[str, Any] = {"state": {"terminated": {"exitCode": 0}}}
    pod = {
        "metadata": {
            "uid": holder.uid,
            "namespace": holder.namespace,
            "annotations": {
                annotations.VGPU_NODE: holder.node,
                annotations.ALLOCATED: holder.shares,
            },
        },
        "spec": {"initContainers": [{}] * holder.inits},
        "status": {
            "phase": holder.phase,
            "initContainerStatuses": [ended] if holder.has_passed_init else [],
        },
    }
    usage.observe(pod)
    if holder.has_passed_init:
        usage.observe(pod)
