"""Builders of pods, Nodes and Events to explain, and what is read of an explanation."""

import datetime as dt
from typing import Any

from agent.kube.reader import ClusterNode, ClusterSnapshot, ListedPod, PodEventView
from agent.sandbox.explain.decide import explain_pod
from agent.sandbox.explain.story import Explanation, Gate
from tests.fakes.explain_rig import REGISTER, a_gpu, report_of

NOW = dt.datetime(2026, 1, 2, 12, tzinfo=dt.UTC)
GPU, MEMORY, CORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"
Json = dict[str, Any]


def a_pod(status: Json | None = None, node: str = "", age: float = 600, **parts: Any) -> Json:
    born = (NOW - dt.timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ")
    metadata: Json = {"name": "p", "namespace": "d", "uid": "own", "creationTimestamp": born}
    limits = {GPU: "1", MEMORY: "1000"} | parts.pop("limits", {})
    container = {"name": "main", "resources": {"limits": limits}}
    spec = {"schedulerName": "hami-scheduler", "nodeName": node, "containers": [container]}
    return {
        "metadata": {"labels": {}, "annotations": {}} | metadata | parts.pop("metadata", {}),
        "spec": spec | parts,
        "status": {"phase": "Pending"} | (status or {}),
    }


def said(message: str, reason: str = "Unschedulable") -> Json:
    """The status of a pod of which a scheduler said this last."""
    one = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return {"conditions": [one]}


def event(
    reason: str, message: str, age: float = 20, writer: str = "x", about: str = "p"
) -> PodEventView:
    last = NOW - dt.timedelta(seconds=age)
    return PodEventView("Warning", reason, message, writer, last, about=about)


def a_node(name: str = "n1", *gpus: Any, slices: int = 10, **parts: Any) -> ClusterNode:
    report = report_of(*(gpus or (a_gpu("GPU-a"),)))
    return ClusterNode(name, {REGISTER: report} | parts.pop("marks", {}), slices=slices, **parts)


def a_holder(name: str, shares: str, phase: str = "Running", **parts: Any) -> ListedPod:
    """A pod for which HAMi's scheduler chose GPUs, by default of the Node n1."""
    known = {"namespace": "d", "uid": name, "chosen": "n1", "shares": shares, "phase": phase}
    return ListedPod(name=name, **(known | parts))


def told(pod: Json, *events: PodEventView, **parts: Any) -> Explanation:
    nodes = parts.pop("nodes", (a_node(),))
    snapshot = ClusterSnapshot(pod, NOW, nodes, events=events, **parts)
    return explain_pod(snapshot, NOW)


def gate_of(found: Explanation, name: str) -> Gate:
    return next(gate for gate in found.gates if gate.name == name)


def blocked(found: Explanation) -> tuple[str, str]:
    """Gate and id of what blocks the pod; both empty if nothing does."""
    return next(((g.name, g.reason) for g in found.gates if g.verdict.value == "blocked"), ("", ""))


def words(found: Explanation) -> str:
    """All that people read of the gates and Nodes."""
    parts = [(gate.said, *gate.facts, gate.advice) for gate in found.gates]
    parts += [(node.said, *node.biggest, *node.events) for node in found.nodes]
    return " | ".join(text for part in parts for text in part)
