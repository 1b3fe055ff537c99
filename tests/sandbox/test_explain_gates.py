"""What the gates after the search say: lock, answer of the device plugin, start, holdings."""

import datetime as dt
from typing import Any

import pytest

from agent.hami.pod import encode_node_lock
from agent.kube.reader import ClusterNode, ClusterSnapshot, GpuHolder, PodEventView, Taint, Unread
from agent.sandbox.explain.decide import explain_pod
from agent.sandbox.explain.story import Explanation, Gate
from agent.sandbox.explain.world import refuse_node
from tests.fakes.chance import Seeded
from tests.fakes.explain_rig import LOCK, REGISTER, a_gpu, report_of

NOW = dt.datetime(2026, 1, 2, 12, tzinfo=dt.UTC)
Json = dict[str, Any]
ALLOCATED = "hami.io/vgpu-devices-allocated"


def a_pod(node: str = "", status: Json | None = None, **marks: str) -> Json:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
    noted = {f"hami.io/{key.replace('_', '-')}": text for key, text in marks.items()}
    return {
        "metadata": {
            "name": "p",
            "namespace": "d",
            "uid": "own",
            "labels": {},
            "annotations": noted,
            "creationTimestamp": "2026-01-02T11:00:00Z",
        },
        "spec": {
            "schedulerName": "hami-scheduler",
            "nodeName": node,
            "containers": [{"name": "main", "resources": {"limits": limits}}],
        },
        "status": {"phase": "Pending"} | (status or {}),
    }


def told(pod: Json, lock: str | None = None, **parts: Any) -> Explanation:
    marks = {REGISTER: report_of(a_gpu("GPU-a"))} | ({} if lock is None else {LOCK: lock})
    nodes = (ClusterNode("n1", marks, slices=10),)
    return explain_pod(ClusterSnapshot(pod, NOW, nodes, **parts), NOW, Seeded())


def seen(gate: Gate) -> tuple[str, str]:
    return gate.verdict.name, gate.reason


def locked(owner: str, age: float) -> str:
    return encode_node_lock(NOW - dt.timedelta(seconds=age), "d", owner)


def holder(phase: str) -> GpuHolder:
    return GpuHolder("other", "d", "other", "n1", "GPU-a,NVIDIA,1,0:;", phase)


def test_without_a_node_no_kubelet_is_said_to_start_anything():
    gates = told(a_pod())

    assert ("PASSED", "") == seen(gates.gate("placement"))
    assert ("NOT_REACHED", "") == seen(gates.gate("start"))
    assert ("WAITING", "E-START") == seen(told(a_pod("n1")).gate("start"))


@pytest.mark.parametrize(
    ("lock", "holders", "expected", "words"),
    [
        (locked("p", 3), (), ("WAITING", "E-LOCK"), "the pod itself holds the lock of n1"),
        (locked("other", 3), (holder("Pending"),), ("WAITING", "E-LOCK"), "normal for seconds"),
        (locked("other", 90), (holder("Pending"),), ("BLOCKED", "E-LOCK"), "too long"),
        (locked("other", 3), (holder("Failed"),), ("BLOCKED", "E-LOCK"), "has ended (Failed)"),
        (locked("other", 3), (), ("BLOCKED", "E-LOCK"), "that pod does not exist"),
        ("2026-01-02T11:59:50Z", (), ("WAITING", "E-LOCK"), "no pod (it names none) for 10 s"),
        ("2026-01-02T11:50:00Z", (), ("BLOCKED", "E-LOCK"), "for 10 min, too long"),
        ("soon,d,other", (), ("BLOCKED", "E-LOCK"), "cannot be read"),
        (None, (), ("PASSED", ""), "no lock on n1"),
    ],
)
def test_a_lock_is_judged_by_its_owner_and_its_age(
    lock: str | None, holders: tuple, expected: tuple[str, str], words: str
):
    gate = told(a_pod(), lock, holders=holders).gate("binding")

    assert expected == seen(gate)
    assert words in gate.said


def test_without_the_pods_no_owner_of_a_lock_is_called_dead():
    unread = (Unread("pods", "no right"),)
    pod = a_pod(vgpu_node="n1")

    gate = told(pod, locked("other", 3), unread=unread).gate("binding")

    assert ("WAITING", "E-LOCK") == seen(gate)


def event(reason: str, message: str) -> PodEventView:
    return PodEventView("Warning", reason, message, "x", NOW - dt.timedelta(seconds=9))


def test_a_lock_that_failed_a_binding_and_is_gone_blocks_nothing():
    events = (event("BindingFailed", "node n1 has been locked within 5m0s: contention"),)

    assert ("PASSED", "") == seen(told(a_pod(), events=events).gate("binding"))


@pytest.mark.parametrize(
    ("phase", "status", "expected"),
    [
        ("allocating", {}, ("WAITING", "E-ALLOCATE")),
        ("failed", {}, ("BLOCKED", "E-ALLOCATE")),
        ("success", {}, ("PASSED", "")),
        (
            "allocating",
            {"containerStatuses": [{"name": "main", "state": {"running": {}}}]},
            ("PASSED", ""),
        ),
    ],
)
def test_the_phase_of_the_binding_tells_whether_the_plugin_answered(
    phase: str, status: Json, expected: tuple[str, str]
):
    pod = a_pod("n1", status, bind_phase=phase, bind_time="1767355140")

    explanation = told(pod)

    assert expected == seen(explanation.gate("allocation"))
    assert "bound to n1, 60 s ago" == explanation.gate("binding").said


def test_a_mismatch_that_keeps_a_container_from_its_start_has_its_id():
    waiting = {"reason": "CreateContainerConfigError", "message": "other GPU booked [HA-4006]"}
    status = {"containerStatuses": [{"name": "main", "state": {"waiting": waiting}}]}

    gate = told(a_pod("n1", status, bind_phase="success")).gate("allocation")

    assert ("BLOCKED", "HA-4006") == seen(gate)


def test_an_event_alone_tells_the_refusal_of_a_pod_whose_status_is_late():
    events = (event("UnexpectedAdmissionError", "no room [HA-4003], which is unexpected"),)

    assert ("BLOCKED", "HA-4003") == seen(told(a_pod("n1"), events=events).gate("allocation"))


@pytest.mark.parametrize(
    ("status", "gate", "expected", "words"),
    [
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]},
            "start",
            ("WAITING", "E-START"),
            "pulls images",
        ),
        ({"phase": "Succeeded"}, "running", ("PASSED", ""), "it has ended (Succeeded)"),
        (
            {
                "phase": "Failed",
                "message": "out of memory",
                "containerStatuses": [
                    {"name": "main", "state": {"terminated": {"startedAt": "2026-09-01T12:00:00Z"}}}
                ],
            },
            "running",
            ("BLOCKED", "E-START"),
            "it has ended (Failed)",
        ),
        ({"phase": "Running"}, "running", ("PASSED", ""), "it runs"),
    ],
)
def test_the_phase_of_the_pod_tells_what_became_of_it(
    status: Json, gate: str, expected: tuple[str, str], words: str
):
    found = told(a_pod("n1", status, bind_phase="success")).gate(gate)

    assert (expected, True) == (seen(found), words in found.said)


def test_an_annotation_that_cannot_be_read_is_told_and_not_guessed():
    pod = a_pod("n1", {"phase": "Running"}, bind_phase="success")
    pod["metadata"]["annotations"][ALLOCATED] = "GPU-a,NVIDIA"

    (fact,) = told(pod).gate("running").facts

    assert "the pod's devices annotation cannot be read" in fact


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        ({"nvidia.com/nouse-gputype": "T4"}, "NVIDIA-Tesla T4 found, T4 excluded"),
        ({"nvidia.com/vgpu-mode": "mig"}, "NVIDIA-Tesla T4 found, mode mig wanted"),
        ({"nvidia.com/use-gpuuuid": "GPU-x,GPU-y"}, "GPU-a found, GPU-x or GPU-y wanted"),
        ({"nvidia.com/nouse-gpuuuid": "GPU-a"}, "GPU-a found, GPU-a excluded"),
    ],
)
def test_what_the_pod_asks_of_a_gpu_stands_beside_what_was_found(marks: dict[str, str], words: str):
    pod = a_pod()
    pod["metadata"]["annotations"] = marks

    explanation = told(pod)

    assert [words] == [gpu.said for gpu in explanation.nodes[0].gpus]
    assert [f"drop the annotation {key}" for key in marks] == [
        change.said for change in explanation.changes
    ]


def test_to_wait_for_a_pod_that_is_being_deleted_is_the_smallest_change():
    full = GpuHolder("h", "d", "full", "n1", "GPU-a,NVIDIA,15500,0:;", "Running", is_deleted=True)

    first, *_ = told(a_pod(), holders=(full,)).changes

    assert "wait for d/full, which is being deleted (it holds 15,500 MiB on n1)" == first.said


def test_a_cluster_without_gpus_is_told_as_such():
    pod = a_pod()
    nodes = (ClusterNode("cpu-1"), ClusterNode("cpu-2"))
    snapshot = ClusterSnapshot(pod, NOW, nodes)

    gate = explain_pod(snapshot, NOW, Seeded()).gate("placement")

    assert ("BLOCKED", "NodeUnregistered") == seen(gate)
    assert ("not counted: 2 Nodes without GPUs",) == gate.facts


def test_init_containers_that_passed_free_what_only_they_held():
    shares = "GPU-a,NVIDIA,16000,0:;GPU-a,NVIDIA,1000,0:;"
    passed = GpuHolder("h", "d", "h", "n1", shares, "Running", inits=1, has_passed_init=True)
    waiting = GpuHolder("h", "d", "h", "n1", shares, "Running", inits=1)

    assert "PASSED" == told(a_pod(), holders=(passed,)).gate("placement").verdict.name
    assert "CardInsufficientMemory" == told(a_pod(), holders=(waiting,)).gate("placement").reason


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
