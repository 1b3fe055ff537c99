"""Pods and Nodes of the API server to views: each field, quantities, and who wrote what.

What is kept of the objects of a cluster, and what counts as absent.
"""

import datetime as dt
import itertools
from typing import Any

import msgspec
import pytest

from agent.cluster import ALLOCATED, NOT_WHOLE, REGISTER, NodeView, PodView, Role
from agent.errors import MalformedText
from agent.kube.objects import decode_node, decode_pod, decode_quantity
from agent.kube.reader import (
    ListedPod,
    PodEventView,
    annotation_writes,
    decode_listed,
    decode_pod_event,
)
from tests.builders import G1, POD_UID, a_container, a_share
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


@pytest.mark.parametrize(
    ("conditions", "scheduled"),
    [
        ([], False),
        (None, False),
        ("True", False),
        ([None, {}, {"type": ["PodScheduled"]}], False),
        ([{"type": "Ready", "status": "True"}], False),
        ([{"type": "Ready"}, {"type": "PodScheduled", "status": "True"}], True),
        # A scheduler that gave up its own bind too late bound it all the same.
        ([{"type": "Ready"}, {"type": "PodScheduled", "status": "False"}], True),
    ],
)
def test_a_pod_with_its_condition_was_bound_by_a_scheduler(conditions: object, scheduled: object):
    assert scheduled is decode_pod(pod_object(status={"conditions": conditions}), GPU).scheduled


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
    ("entry", "is_disabled"),
    [
        *(({"value": word}, True) for word in ("1", "t", "T", "TRUE", "true", "True")),
        *(({"value": word}, False) for word in ("yes", "tRUE", "0")),
        ({"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, False),
        ({"name": "OTHER", "value": "true"}, False),
        (None, False),
    ],
)
def test_control_is_disabled_by_what_go_reads_as_true(entry, is_disabled):
    name = "CUDA_DISABLE_CONTROL"
    own = "CUDA_DISABLE_CONTROL=true" if entry is None else {"name": name} | entry
    env = [{"name": name, "value": "no"}, own]

    assert is_disabled is container(env=env).containers[0].control_disabled


PRIORITIES = [
    ([], 1),
    ([{"value": "0"}], 0),
    ([{"value": " +7x"}], 7),
    ([{"value": "-3"}], -3),
    ([{}], 0),
    ([{"value": "0"}, {"value": "2"}], 2),
    ([{"value": "9" * 5000}], 2**31 - 1),
    ([{"value": "0"}, {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}], 1),
    ([{"value": "$(LEVEL)"}], 1),
]
"""What HAMi-core reads, and 1 where the pod does not say it."""
POLICIES = [
    ([], ""),
    ([{"value": "force"}], "force"),
    ([{"value": "force"}, {"value": "DISABLE"}], "DISABLE"),
    ([{"value": "force"}, {"valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}], ""),
    ([{"value": "$(POLICY)"}], ""),
    ([{}], ""),
]


@pytest.mark.parametrize(
    ("variable", "field", "entries", "expected"),
    [
        *(("CUDA_TASK_PRIORITY", "priority", *case) for case in PRIORITIES),
        *(("GPU_CORE_UTILIZATION_POLICY", "core_policy", *case) for case in POLICIES),
    ],
)
def test_of_a_variable_of_hami_core_the_last_literal_value_counts(
    variable, field, entries, expected
):
    env = [{"name": variable} | entry for entry in entries]
    assert expected == getattr(container(env=env).containers[0], field)


@pytest.mark.parametrize(
    ("runtime_class", "unkept"),
    [
        ("gvisor", "HAMi-core does not work under the runtime class gvisor"),
        ("kata-qemu-nvidia-gpu", "HAMi-core does not work under the runtime class kata-qemu-nvid"),
        ("gpu-kata.v2", "HAMi-core does not work under the runtime class gpu-kata.v2"),
        ("", ""),
        ("nvidia", ""),
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


def test_only_annotations_of_hami_are_kept_and_a_mirror_pod_is_static():
    annotations = {"hami.io/bind-phase": "success", "team": "a", "kubernetes.io/config.mirror": ""}
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "[HA-2001]"}
    pod = decode_pod(pod_object(metadata={"annotations": annotations}, status=status), GPU)
    assert {"hami.io/bind-phase": "success"} == pod.annotations
    assert pod.static
    assert ("UnexpectedAdmissionError", "[HA-2001]") == (pod.reason, pod.message)


@pytest.mark.parametrize(
    ("text", "groups", "error"),
    [
        (f"{G1},NVIDIA,3000,30:;", ((a_share(),), ()), ""),
        (vectors("pod_decode")["pod_decode-056"].given, None, ""),  # no annotation
        (f"{G1},NVIDIA,3000:;", None, "devices text, group 0"),
        (f"{G1},NVIDIA,-1,0:;", None, "devices text, group 0"),
    ],
)
def test_what_the_scheduler_gave_is_decoded_once_or_is_a_reason(text, groups, error):
    marks = {} if text is None else {ALLOCATED: text}
    pod = decode_pod(pod_object(metadata={"annotations": marks}), GPU)

    assert groups == pod.groups
    assert error in pod.groups_error
    assert bool(error) is bool(pod.groups_error)


@pytest.mark.parametrize("missing", ["uid", "name"])
@pytest.mark.parametrize("decode", [lambda obj: decode_pod(obj, GPU), decode_node])
def test_an_object_without_uid_or_name_is_refused(decode, missing: str):
    with pytest.raises(MalformedText, match=r"metadata\.uid and metadata\.name"):
        decode(pod_object(metadata={missing: 7}))
    with pytest.raises(MalformedText, match="without a name"):
        decode({})


def test_a_node_keeps_all_annotations_and_labels():
    metadata = {"annotations": {REGISTER: "[]", "other": "x", "odd": 1}, "labels": {"gpu": "on"}}
    expected = NodeView("train-0", POD_UID, "1", {REGISTER: "[]", "other": "x"}, {"gpu": "on"})
    assert expected == decode_node(pod_object(metadata=metadata))


ODD = (None, True, 7, "x", [], [None, 7, "x", [], {}], {"": None}, {"a": {"b": 7}}, [{"name": 7}])
FIELDS = ("annotations", "labels", "namespace", "phase", "nodeName", "conditions", "schedulerName")
LISTS = ("containers", "initContainers", "containerStatuses", "initContainerStatuses")
INNER = ("name", "resources", "env", "restartPolicy", "state", "lastState", "containerID")


def test_fields_of_odd_types_never_fail():
    parts = [{key: odd} for odd in ODD for key in (*FIELDS, *LISTS)]
    parts += [
        {key: [{"name": "main", name: odd}]} for odd in ODD for key in LISTS for name in INNER
    ]
    for part, place in itertools.product(parts, ("metadata", "spec", "status")):
        odd = pod_object(**{place: part})
        assert (POD_UID, "train-0") == (decode_pod(odd, GPU).uid, decode_node(odd).name)


@pytest.mark.parametrize(
    ("kind", "policy", "own", "exit_code", "is_over"),
    [
        ("containers", "Never", {}, 0, True),
        ("containers", "Never", {}, 1, True),
        ("containers", "OnFailure", {}, 0, True),
        ("containers", "OnFailure", {}, 1, False),
        ("containers", "Always", {}, 0, False),
        # A container's own policy wins, and its rules may start it again.
        ("containers", "Never", {"restartPolicy": "Always"}, 0, False),
        ("containers", "Never", {"restartPolicyRules": [{"action": "Restart"}]}, 0, False),
        # An init container is over when it ended well, a sidecar never.
        ("initContainers", "Always", {}, 0, True),
        ("initContainers", "Never", {}, 1, False),
        ("initContainers", "Never", {"restartPolicy": "Always"}, 0, False),
    ],
)
def test_a_container_is_over_when_nothing_starts_it_again(kind, policy, own, exit_code, is_over):
    at = "2026-09-01T12:00:07Z"
    state = {"terminated": {"exitCode": exit_code, "finishedAt": at}}
    status = {"name": "main", "containerID": "c://x", "state": state}
    statuses = {"containers": "containerStatuses", "initContainers": "initContainerStatuses"}
    spec = {"restartPolicy": policy, "containers": [], kind: [{"name": "main"} | own]}

    (found,) = decode_pod(pod_object(spec=spec, status={statuses[kind]: [status]}), GPU).containers

    ended = dt.datetime(2026, 9, 1, 12, 0, 7, tzinfo=dt.UTC) if is_over else None
    assert (None, True, ended) == (found.running_id, found.has_run, found.ended_at)


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
    limits = {GPU: "1", "cpu": "4", "a.com/mem": "3k", "a.com/none": "0", "a.com/part": "1500m"}
    requests = {"a.com/vgpu": 2, "a.com/bad": "x", "a.com/mem": 7}
    (found,) = container(resources={"limits": limits, "requests": requests}).containers

    others = {"a.com/bad": NOT_WHOLE, "a.com/part": NOT_WHOLE, "a.com/none": 0, "a.com/mem": 3000}
    assert others | {"a.com/vgpu": 2} == dict(found.others)
    renamed = found.asking_by("a.com/vgpu")
    assert (1, GPU, 2, "a.com/vgpu") == (
        found.count,
        found.resource,
        renamed.count,
        renamed.resource,
    )
    assert found == renamed.asking_by(GPU)


# Kubernetes quantities.


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("2", 2),
        ("+3", 3),
        ("-1", -1),
        ("1k", 1000),
        ("1.5Gi", 1610612736),
        ("2.", 2),
        (".5", 1),
        ("500m", 1),
        ("1001m", 2),
        ("1e2", 100),
        ("5e-1", 1),
        ("1E2", 100),
        ("1E", 10**18),
        ("1Ei", 2**60),
        *(
            (text, None)
            for text in ("", "abc", ".", "1ki", "1KB", "1 ", "1e", "--1", "1e999", "9" * 65)
        ),
    ],
)
def test_a_quantity_is_a_whole_number_rounded_up_and_any_other_text_is_none(text, number):
    assert number == decode_quantity(text)


# Who wrote an annotation last, as the API server keeps it.

EARLY = "2026-01-01T00:00:00Z"


def by(manager: str, time: str, *keys: str) -> dict[str, Any]:
    fields = {"f:metadata": {"f:annotations": {f"f:{key}": {} for key in keys}}}
    return {"manager": manager, "time": time, "fieldsV1": fields}


@pytest.mark.parametrize(
    ("managed", "writes"),
    [
        ([by("plugin", EARLY, REGISTER, "seen")], [(REGISTER, "plugin"), ("seen", "plugin")]),
        ([by("plugin", EARLY), by("other", EARLY, REGISTER)], [(REGISTER, "other")]),
        ("none", []),
        ([None, {"manager": 1, "fieldsV1": {"f:metadata": []}}], []),
        (None, []),
    ],
)
def test_who_wrote_an_annotation_is_told_with_the_time(managed: Any, writes: list):
    told = [(key, writer, EARLY) for key, writer in writes]
    assert told == list(annotation_writes({"managedFields": managed}))


MIDDAY = dt.datetime(2026, 1, 2, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("parts", "last", "writer"),
    [
        ({"lastTimestamp": "2026-01-02T12:00:00Z"}, MIDDAY, ""),
        ({"eventTime": "2026-01-02T12:00:00Z", "reportingComponent": "kubelet"}, MIDDAY, "kubelet"),
        (
            {
                "series": {"lastObservedTime": "2026-01-02T12:00:00.000000Z"},
                "source": {"component": "hami-scheduler"},
            },
            MIDDAY,
            "hami-scheduler",
        ),
        ({"metadata": {"creationTimestamp": "2026-01-02T12:00:00Z"}}, MIDDAY, ""),
        ({"lastTimestamp": "noon"}, None, ""),
    ],
)
def test_an_event_of_either_form_has_a_last_time(
    parts: dict, last: dt.datetime | None, writer: str
):
    event = {"type": "Warning", "reason": "FilteringFailed", "message": "no"} | parts

    assert PodEventView("Warning", "FilteringFailed", "no", writer, last) == (
        decode_pod_event(event)
    )


@pytest.mark.parametrize(
    ("volumes", "is_plugin"),
    [
        ([{"emptyDir": {}}, {"hostPath": {"path": "/data/kubelet/device-plugins/"}}], True),
        # The label alone makes no agent.
        *((one, False) for one in (None, [], [{"hostPath": {"path": "/var/lib/kubelet"}}], [3])),
    ],
)
def test_a_device_plugin_mounts_the_directory_of_plugins(volumes: list | None, *, is_plugin: bool):
    labels = {"app.kubernetes.io/component": "hami-agent"}
    spec = {"nodeName": "n1", "volumes": volumes}
    pod = {"metadata": {"namespace": "d", "name": "p", "labels": labels}, "spec": spec}
    expected = ListedPod("d", "p", "n1")

    assert msgspec.structs.replace(expected, is_plugin=is_plugin) == decode_listed(pod)
