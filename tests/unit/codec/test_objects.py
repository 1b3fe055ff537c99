"""Pods and Nodes of the API server to views."""

import datetime as dt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.allocate.room import NOT_WHOLE
from agent.cluster import ALLOCATED, REGISTER, NodeView, Phase, PodView, Role
from agent.errors import MalformedText
from agent.kube.objects import EPOCH, decode_node, decode_pod
from tests.builders import G1, POD_UID, a_container, a_pod, a_share
from tests.hami_vectors import vectors

GPU = "nvidia.com/gpu"
BOUND = [{"type": "PodScheduled", "status": "True"}]


def pod_object(**parts: Any) -> dict[str, Any]:
    """A pod of one GPU container; `parts` replace spec, status or metadata fields."""
    metadata = {
        "uid": POD_UID,
        "namespace": "team-a",
        "name": "train-0",
        "resourceVersion": "1",
        "creationTimestamp": "2026-09-01T12:00:00Z",
        **parts.get("metadata", {}),
    }
    spec = {
        "nodeName": "node-1",
        "schedulerName": "hami-scheduler",
        "containers": [{"name": "main", "resources": {"limits": {GPU: "1"}}}],
        **parts.get("spec", {}),
    }
    return {
        "metadata": metadata,
        "spec": spec,
        "status": {"phase": "Pending", "conditions": BOUND} | parts.get("status", {}),
    }


def container(**parts: Any) -> PodView:
    """The pod whose only container is `parts`."""
    return decode_pod(pod_object(spec={"containers": [{"name": "main", **parts}]}), GPU)


def test_a_pending_pod_of_one_gpu_container():
    assert a_pod(reusable_name=True) == decode_pod(pod_object(), GPU)


def test_a_generated_name_does_not_return():
    pod = pod_object()
    pod["metadata"]["generateName"] = "train-"

    assert a_pod() == decode_pod(pod, GPU)


@pytest.mark.parametrize(
    "conditions",
    [
        [],
        None,
        "True",
        [None, {}, {"type": ["PodScheduled"]}],
        [{"type": "Ready", "status": "True"}],
    ],
)
def test_without_its_condition_no_scheduler_bound_it(conditions: object):
    assert not decode_pod(pod_object(status={"conditions": conditions}), GPU).scheduled


@pytest.mark.parametrize("status", ["True", "False"])
def test_a_pod_whose_scheduler_gave_up_its_own_bind_too_late_was_bound_by_it(status: str):
    conditions = [{"type": "Ready"}, {"type": "PodScheduled", "status": status}]

    assert decode_pod(pod_object(status={"conditions": conditions}), GPU).scheduled


def test_init_containers_and_sidecars_come_first_in_the_order_of_the_spec():
    spec = {
        "initContainers": [
            {"name": "fetch", "resources": {"limits": {GPU: 2}}},
            {"name": "proxy", "restartPolicy": "Always"},
        ],
        "containers": [{"name": "a"}, {"name": "b", "resources": {"limits": {GPU: "3"}}}],
    }
    expected = (
        a_container(name="fetch", role=Role.INIT, count=2),
        a_container(name="proxy", role=Role.SIDECAR, count=0),
        a_container(name="a", count=0),
        a_container(name="b", count=3),
    )
    assert expected == decode_pod(pod_object(spec=spec), GPU).containers


@pytest.mark.parametrize(
    ("resources", "count"),
    [
        ({"requests": {GPU: "2"}}, 2),
        ({"requests": {GPU: "2"}, "limits": {"cpu": "1"}}, 2),
        ({"requests": {GPU: "2"}, "limits": {GPU: "4"}}, 4),
        ({"limits": {GPU: "1k"}}, 1000),
        ({"limits": {GPU: "many"}}, 0),
        ({"limits": {GPU: "-1"}}, 0),
        ({"limits": {GPU: True}}, 0),
        ({"limits": {GPU: 2**63}}, 0),
        ({"limits": [GPU]}, 0),
        ({}, 0),
    ],
)
def test_the_count_is_the_limit_else_the_request(resources, count: int):
    assert count == container(resources=resources).containers[0].count


@pytest.mark.parametrize(
    ("written", "amount"),
    [
        ("3000", 3000),
        ("3k", 3000),  # how an API server writes 3000
        (3000, 3000),
        ("0", 0),
        ("3Gi", 3 * 2**30),
        ("2000m", 2),
        ("1500m", NOT_WHOLE),
        ("-1", -1),
        ("much", NOT_WHOLE),
    ],
)
def test_an_amount_of_another_resource_is_the_limit_else_the_request(written: object, amount: int):
    for resources in (
        {"limits": {GPU: "1", "a.com/mem": written}, "requests": {"a.com/mem": 7}},
        {"limits": {GPU: "1"}, "requests": {"a.com/mem": written}},
    ):
        assert (("a.com/mem", amount),) == container(resources=resources).containers[0].others


@pytest.mark.parametrize(("start", "started"), [("2026-09-01T12:00:00Z", True), (None, False)])
def test_the_scheduler_of_a_pod_and_its_start_by_the_kubelet_are_read(start, started):
    pod = pod_object(spec={"schedulerName": "hami-scheduler"}, status={"startTime": start})
    found = decode_pod(pod, GPU)

    assert ("hami-scheduler", started) == (found.scheduler, found.started)


@pytest.mark.parametrize("word", ["1", "t", "T", "TRUE", "true", "True"])
def test_control_is_disabled_by_what_go_reads_as_true(word: str):
    env = [
        {"name": "CUDA_DISABLE_CONTROL", "value": "no"},
        {"name": "CUDA_DISABLE_CONTROL", "value": word},
    ]
    assert container(env=env).containers[0].control_disabled


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "CUDA_DISABLE_CONTROL", "value": "yes"},
        {"name": "CUDA_DISABLE_CONTROL", "value": "tRUE"},
        {"name": "CUDA_DISABLE_CONTROL", "value": "0"},
        {"name": "CUDA_DISABLE_CONTROL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "OTHER", "value": "true"},
        "CUDA_DISABLE_CONTROL=true",
    ],
)
def test_control_stays_on_otherwise(entry):
    assert not container(env=[entry]).containers[0].control_disabled


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], 1),
        ([{"value": "0"}], 0),
        ([{"value": " +7x"}], 7),
        ([{"value": "-3"}], -3),
        ([{"value": "high"}], 0),
        ([{"value": ""}], 0),
        ([{}], 0),
        ([{"value": "0"}, {"value": "2"}], 2),
        ([{"value": "9" * 5000}], 2**31 - 1),
        ([{"value": "0"}, {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}], 1),
        ([{"value": "$(LEVEL)"}], 1),
    ],
)
def test_the_priority_is_what_hami_core_reads_and_1_where_the_pod_does_not_say_it(
    entries, expected
):
    env = [{"name": "CUDA_TASK_PRIORITY"} | entry for entry in entries]
    assert expected == container(env=env).containers[0].priority


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], ""),
        ([{"value": "force"}], "force"),
        ([{"value": "force"}, {"value": "DISABLE"}], "DISABLE"),
        ([{"value": "force"}, {"valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}], ""),
        ([{"value": "$(POLICY)"}], ""),
        ([{}], ""),
    ],
)
def test_the_policy_of_the_compute_limit_is_the_last_literal_one(entries, expected):
    env = [{"name": "GPU_CORE_UTILIZATION_POLICY"} | entry for entry in entries]
    assert expected == container(env=env).containers[0].core_policy


@pytest.mark.parametrize(
    ("runtime_class", "unkept"),
    [
        ("gvisor", "HAMi-core does not work under the runtime class gvisor"),
        ("runsc-nvproxy", "HAMi-core does not work under the runtime class runsc-nvproxy"),
        ("kata", "HAMi-core does not work under the runtime class kata"),
        ("kata-qemu-nvidia-gpu", "HAMi-core does not work under the runtime class kata-qemu-nvid"),
        ("gpu-kata.v2", "HAMi-core does not work under the runtime class gpu-kata.v2"),
        ("", ""),
        ("nvidia", ""),
        ("nvidia-cdi", ""),
        ("crun", ""),
        ("strakata", ""),
        (7, ""),
    ],
)
def test_under_a_runtime_that_hami_core_does_not_reach_no_limit_is_kept(runtime_class, unkept):
    spec = {"containers": [{"name": "main"}], "runtimeClassName": runtime_class}
    found = decode_pod(pod_object(spec=spec), GPU).unkept("main")

    assert found.startswith(unkept)
    assert bool(found) is bool(unkept)


def test_of_a_pod_only_the_containers_without_control_keep_no_limit():
    off = {"name": "CUDA_DISABLE_CONTROL", "value": "true"}
    spec = {"containers": [{"name": "main"}, {"name": "free", "env": [off]}]}
    pod = decode_pod(pod_object(spec=spec), GPU)

    assert ("", "") == (pod.unkept("main"), pod.unkept("other"))
    assert "CUDA_DISABLE_CONTROL keeps HAMi-core out" == pod.unkept("free")


def test_a_container_runs_while_its_status_says_so():
    status = {
        "phase": "Running",
        "initContainerStatuses": [
            {"name": "fetch", "containerID": "containerd://aa", "state": {"terminated": {}}},
            {"name": "proxy", "containerID": "containerd://bb", "state": {"running": {}}},
        ],
        "containerStatuses": [
            {"name": "main", "containerID": "cc", "state": {"running": {"startedAt": "x"}}},
            {"name": "fetch", "containerID": "containerd://dd", "state": {"running": {}}},
        ],
    }
    spec = {"initContainers": [{"name": "fetch"}, {"name": "proxy"}]}
    pod = decode_pod(pod_object(spec=spec, status=status), GPU)
    assert [None, "bb", "cc"] == [container.running_id for container in pod.containers]
    assert Phase.RUNNING is pod.phase


@pytest.mark.parametrize(
    ("text", "phase"), [("", Phase.PENDING), ("Failed", Phase.FAILED), ("New", Phase.UNKNOWN)]
)
def test_a_phase_of_later_versions_is_unknown(text: str, phase: Phase):
    assert phase is decode_pod(pod_object(status={"phase": text}), GPU).phase


def test_only_annotations_of_hami_are_kept_and_a_mirror_pod_is_static():
    annotations = {"hami.io/bind-phase": "success", "team": "a", "kubernetes.io/config.mirror": ""}
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "[HA-2001]"}
    pod = decode_pod(pod_object(metadata={"annotations": annotations}, status=status), GPU)
    assert {"hami.io/bind-phase": "success"} == pod.annotations
    assert pod.static
    assert ("UnexpectedAdmissionError", "[HA-2001]") == (pod.reason, pod.message)


def test_what_the_scheduler_gave_is_decoded_once():
    metadata = {"annotations": {ALLOCATED: f"{G1},NVIDIA,3000,30:;"}}
    assert ((a_share(),), ()) == decode_pod(pod_object(metadata=metadata), GPU).groups


def test_a_pod_without_the_annotation_has_no_groups():
    assert vectors("pod_decode")["pod_decode-056"].given is None
    pod = decode_pod(pod_object(), GPU)
    assert (None, "") == (pod.groups, pod.groups_error)


@pytest.mark.parametrize("text", [f"{G1},NVIDIA,3000:;", f"{G1},NVIDIA,-1,0:;"])
def test_groups_that_cannot_be_granted_are_a_reason_and_no_failure(text: str):
    pod = decode_pod(pod_object(metadata={"annotations": {ALLOCATED: text}}), GPU)
    assert pod.groups is None
    assert "devices text, group 0" in pod.groups_error


@pytest.mark.parametrize("missing", ["uid", "name"])
@pytest.mark.parametrize("decode", [lambda obj: decode_pod(obj, GPU), decode_node])
def test_an_object_without_uid_or_name_is_refused(decode, missing: str):
    with pytest.raises(MalformedText, match=r"metadata\.uid and metadata\.name"):
        decode(pod_object(metadata={missing: 7}))
    with pytest.raises(MalformedText, match="without a name"):
        decode({})


@pytest.mark.parametrize("text", ["", "yesterday", 7])
def test_a_pod_without_a_time_of_creation_is_the_oldest(text):
    assert EPOCH == decode_pod(pod_object(metadata={"creationTimestamp": text}), GPU).created
    assert EPOCH < dt.datetime(2014, 6, 6, tzinfo=dt.UTC)


def test_a_node_keeps_all_annotations_and_labels():
    metadata = {"annotations": {REGISTER: "[]", "other": "x", "odd": 1}, "labels": {"gpu": "on"}}
    expected = NodeView("train-0", POD_UID, "1", {REGISTER: "[]", "other": "x"}, {"gpu": "on"})
    assert expected == decode_node(pod_object(metadata=metadata))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=6,
)
KEYS = ["annotations", "labels", "namespace", "containers", "initContainers", "containerStatuses"]
odd_parts = st.dictionaries(st.sampled_from([*KEYS, "phase", "nodeName"]), json_values, max_size=4)


@given(odd_parts, odd_parts, odd_parts)
def test_fields_of_odd_types_never_fail(metadata, spec, status):
    odd = pod_object(metadata=metadata, spec=spec, status=status)
    assert POD_UID == decode_pod(odd, GPU).uid
    assert "train-0" == decode_node(odd).name


def ended(policy: str, exit_code: int = 0) -> dict[str, Any]:
    state = {"terminated": {"exitCode": exit_code, "finishedAt": "2026-09-01T12:00:07Z"}}
    status = {"containerStatuses": [{"name": "main", "containerID": "c://x", "state": state}]}
    containers = [{"name": "main", "resources": {"limits": {GPU: "1"}}}]
    return pod_object(spec={"restartPolicy": policy, "containers": containers}, status=status)


@pytest.mark.parametrize(
    ("policy", "exit_code", "is_over"),
    [
        ("Never", 0, True),
        ("Never", 1, True),
        ("OnFailure", 0, True),
        ("OnFailure", 1, False),
        ("Always", 0, False),
    ],
)
def test_a_container_is_over_when_its_pods_policy_never_starts_it_again(policy, exit_code, is_over):
    (container,) = decode_pod(ended(policy, exit_code), GPU).containers

    at = dt.datetime(2026, 9, 1, 12, 0, 7, tzinfo=dt.UTC) if is_over else None
    assert (None, True, at) == (container.running_id, container.has_run, container.ended_at)


@pytest.mark.parametrize(
    ("own", "is_over"),
    [
        ({"restartPolicy": "Always"}, False),
        ({"restartPolicy": "Never", "restartPolicyRules": [{"action": "Restart"}]}, False),
        ({}, True),
    ],
    ids=["its own policy", "its own rules", "the pod's"],
)
def test_a_containers_own_restart_policy_wins(own, is_over):
    pod = ended("Never", 0)
    pod["spec"]["containers"][0] |= own

    (container,) = decode_pod(pod, GPU).containers

    assert is_over is (container.ended_at is not None)


@pytest.mark.parametrize(("exit_code", "restarts"), [(0, None), (1, None), (0, "Always")])
def test_an_init_container_is_over_when_it_ended_well_and_a_sidecar_never(exit_code, restarts):
    at = "2026-09-01T12:00:07Z"
    state = {"terminated": {"exitCode": exit_code, "finishedAt": at}}
    pod = pod_object(status={"initContainerStatuses": [{"name": "warm-up", "state": state}]})
    init = {"name": "warm-up"} | ({"restartPolicy": restarts} if restarts else {})
    pod["spec"]["initContainers"] = [init]

    container = decode_pod(pod, GPU).containers[0]

    is_over = exit_code == 0 and restarts is None
    assert (dt.datetime(2026, 9, 1, 12, 0, 7, tzinfo=dt.UTC) if is_over else None) == (
        container.ended_at
    )


def test_the_last_start_of_a_container_are_known():
    first, last = "2026-09-01T12:00:07Z", "2026-09-01T12:00:09Z"
    state = {"running": {"startedAt": last}}
    before = {"terminated": {"exitCode": 1, "startedAt": first, "finishedAt": last}}
    status = {"containerStatuses": [{"name": "main", "state": state, "lastState": before}]}

    (container,) = decode_pod(pod_object(status=status), GPU).containers
    (unseen,) = decode_pod(pod_object(), GPU).containers

    at = dt.datetime(2026, 9, 1, 12, 0, 9, tzinfo=dt.UTC)
    assert (at, None) == (container.started_at, unseen.started_at)


def test_a_container_between_two_tries_has_run():
    last = {"terminated": {"exitCode": 1, "finishedAt": "2026-09-01T12:00:07Z"}}
    status = {"containerStatuses": [{"name": "main", "state": {"waiting": {}}, "lastState": last}]}

    (container,) = decode_pod(pod_object(status=status), GPU).containers

    assert (True, None) == (container.has_run, container.ended_at)


@pytest.mark.parametrize(
    ("state", "last", "succeeded"),
    [
        ({"terminated": {"exitCode": 0}}, {}, True),
        ({"running": {}}, {"terminated": {"exitCode": 0}}, True),
        ({"terminated": {"exitCode": 1}}, {}, False),
        ({"terminated": {"exitCode": "0"}}, {}, False),
        ({"terminated": {}}, {}, False),
        ({"waiting": {}}, {}, False),
    ],
)
def test_a_container_has_succeeded_that_ended_with_exit_code_0_once(state, last, succeeded):
    status = {"containerStatuses": [{"name": "main", "state": state, "lastState": last}]}

    (container,) = decode_pod(pod_object(status=status), GPU).containers

    assert succeeded is container.succeeded


def test_other_extended_resources_are_kept_because_ours_may_get_another_name():
    limits = {GPU: "1", "cpu": "4", "nvidia.com/gpumem": "3000", "example.com/none": "0"}
    requests = {"example.com/vgpu": 2, "example.com/bad": "x"}
    (found,) = container(resources={"limits": limits, "requests": requests}).containers

    others = {"example.com/bad": NOT_WHOLE, "example.com/none": 0, "example.com/vgpu": 2}
    assert others | {"nvidia.com/gpumem": 3000} == dict(found.others)
    assert (1, GPU) == (found.count, found.resource)
    renamed = found.asking_by("example.com/vgpu")
    assert (2, "example.com/vgpu") == (renamed.count, renamed.resource)
    assert found == renamed.asking_by(GPU)
