"""Whether kube-scheduler itself offers a Node to HAMi: cordon, taints, selector, affinity.

Source: kube-scheduler 1.36 plugins nodeunschedulable, tainttoleration, nodeaffinity. What it also
checks (CPU, memory, ports, volumes, other pods) is only in its Events.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from agent.core.cluster.snapshot import ClusterNode, JsonObject, Taint

_UNSCHEDULABLE: Final = "node.kubernetes.io/unschedulable"
_EFFECTS: Final = frozenset({"NoSchedule", "NoExecute"})


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
    if required is not None and not _matches_any(required.get("nodeSelectorTerms") or (), node):
        return "the pod's required nodeAffinity does not match its labels"
    return ""


def _is_tolerated(taint: Taint, tolerations: Iterable[Mapping[str, Any]]) -> bool:
    return any(_tolerates(toleration, taint) for toleration in tolerations)


def _tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    operator, key = toleration.get("operator") or "Equal", toleration.get("key") or ""
    if not key:
        return bool(operator == "Exists")
    if key != taint.key:
        return False
    return bool(operator == "Exists" or (toleration.get("value") or "") == taint.value)


def _matches_any(terms: Iterable[Mapping[str, Any]], node: ClusterNode) -> bool:
    return any(_matches(term, node) for term in terms)


def _matches(term: Mapping[str, Any], node: ClusterNode) -> bool:
    """Whether all rules of the term hold. A term without rules matches nothing."""
    labels = [(rule, node.labels) for rule in term.get("matchExpressions") or ()]
    fields = [(rule, {"metadata.name": node.name}) for rule in term.get("matchFields") or ()]
    rules = [*labels, *fields]
    return bool(rules) and all(_holds(rule, values) for rule, values in rules)


def _holds(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, wanted = labels.get(rule.get("key") or ""), rule.get("values") or ()
    operator = str(rule.get("operator"))
    if operator in ("Gt", "Lt"):
        return _is_beyond(value, wanted, is_greater=operator == "Gt")
    answers = {
        "In": value is not None and value in wanted,
        "NotIn": value is None or value not in wanted,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }
    return answers.get(operator, False)


def _is_beyond(value: str | None, wanted: Iterable[str], *, is_greater: bool) -> bool:
    try:
        (bound,) = wanted
        number, limit = int(value or ""), int(bound)
    except ValueError:  # kube-scheduler, too, takes no other text as a number
        return False
    return number > limit if is_greater else number < limit
