"""Which Nodes kube-scheduler offers: cordon, taints, selector, affinity."""

import pytest

from agent.kube.reader import ClusterNode, Taint
from agent.sandbox.explain.world import refuse_node

NODE = ClusterNode("n1", labels={"zone": "a", "gpus": "8"})


def offered(spec: dict, node: ClusterNode = NODE) -> bool:
    return not refuse_node({"metadata": {}, "spec": spec, "status": {}}, node)


def affinity(*terms: dict) -> dict:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"affinity": {"nodeAffinity": required}}


def rule(key: str, operator: str, *values: str) -> dict:
    return {"key": key, "operator": operator, "values": list(values)}


@pytest.mark.parametrize(
    ("tolerations", "is_offered"),
    [
        ([], False),
        ([{"key": "gpu", "operator": "Exists"}], True),
        ([{"key": "gpu", "value": "x"}], True),
        ([{"key": "gpu", "operator": "Equal", "value": "y"}], False),
        ([{"key": "other", "operator": "Exists"}], False),
        ([{"operator": "Exists"}], True),
        ([{"value": "x"}], False),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}], False),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}], True),
    ],
)
def test_a_taint_keeps_a_pod_out_that_does_not_tolerate_it(tolerations: list, *, is_offered: bool):
    node = ClusterNode("n1", taints=(Taint("gpu", "x", "NoSchedule"),))

    assert is_offered == offered({"tolerations": tolerations}, node)


def test_a_taint_that_only_prefers_keeps_no_pod_out():
    assert offered({}, ClusterNode("n1", taints=(Taint("gpu", "x", "PreferNoSchedule"),)))


def test_a_cordoned_node_is_offered_to_a_pod_that_tolerates_the_cordon():
    closed = ClusterNode("n1", is_closed=True)
    toleration = {"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}

    assert not offered({}, closed)
    assert offered({"tolerations": [toleration]}, closed)


def test_every_label_of_the_selector_counts():
    assert offered({"nodeSelector": {"zone": "a"}})
    assert not offered({"nodeSelector": {"zone": "a", "gpus": "4"}})


@pytest.mark.parametrize(
    ("one", "is_offered"),
    [
        (rule("zone", "In", "a", "b"), True),
        (rule("zone", "In", "b"), False),
        (rule("none", "In", "a"), False),
        (rule("zone", "NotIn", "a"), False),
        (rule("none", "NotIn", "a"), True),
        (rule("zone", "Exists"), True),
        (rule("none", "Exists"), False),
        (rule("zone", "DoesNotExist"), False),
        (rule("none", "DoesNotExist"), True),
        (rule("gpus", "Gt", "7"), True),
        (rule("gpus", "Gt", "8"), False),
        (rule("gpus", "Lt", "9"), True),
        (rule("gpus", "Lt", "8"), False),
        (rule("zone", "Gt", "7"), False),
        (rule("none", "Lt", "7"), False),
        (rule("gpus", "Gt", "1", "2"), False),
        (rule("zone", "Like", "a"), False),
    ],
)
def test_a_rule_of_the_affinity_holds_as_in_kubernetes(one: dict, *, is_offered: bool):
    assert is_offered == offered(affinity({"matchExpressions": [one]}))


def test_one_of_the_terms_and_all_of_its_rules_must_hold():
    no, yes = rule("zone", "In", "b"), rule("zone", "In", "a")

    assert offered(affinity({"matchExpressions": [no]}, {"matchExpressions": [yes]}))
    assert not offered(affinity({"matchExpressions": [yes, no]}))
    assert not offered(affinity({}))
    assert not offered(affinity())
    assert offered(affinity({"matchFields": [rule("metadata.name", "In", "n1")]}))
