"""What is kept of the objects of a cluster, and what counts as absent."""

import datetime as dt
import json

import pytest

from agent.errors import MalformedText
from agent.kube.objects import decode_moment
from agent.kube.reader import (
    AgentPod,
    ClusterNode,
    ClusterSnapshot,
    GpuHolder,
    PodEventView,
    RefusedPod,
    Taint,
    Unread,
    decode_agent,
    decode_cluster_node,
    decode_holder,
    decode_name,
    decode_pod_event,
    decode_quota,
    decode_refused,
    decode_target,
)

NOON = dt.datetime(2026, 1, 2, 12, tzinfo=dt.UTC)
REGISTER = "hami.io/node-nvidia-register"


def raw(value: object) -> bytes:
    return json.dumps(value).encode()


def managed(key: str, time: str) -> dict[str, object]:
    fields = {"f:metadata": {"f:annotations": {f"f:{key}": {}}}}
    return {"manager": "x", "time": time, "fieldsV1": fields}


def test_of_a_node_only_what_decides_is_kept():
    node = {
        "metadata": {
            "name": "n1",
            "annotations": {REGISTER: "[]", "note": "long", "hami.io/mutex.lock": "l"},
            "labels": {"zone": "a", "other": "b"},
            "managedFields": [
                managed(REGISTER, "2026-01-02T11:00:00Z"),
                managed("hami.io/device-cordon", "2026-01-02T12:00:00Z"),
                managed("note", "2026-01-02T13:00:00Z"),
                managed(REGISTER, "noon"),
            ],
        },
        "spec": {
            "unschedulable": True,
            "taints": [{"key": "gpu", "value": "x", "effect": "NoSchedule"}],
        },
        "status": {
            "allocatable": {"nvidia.com/gpu": "80"},
            "conditions": [{"type": "Ready", "status": "False"}],
        },
    }

    expected = ClusterNode(
        name="n1",
        annotations={REGISTER: "[]", "hami.io/mutex.lock": "l"},
        labels={"zone": "a"},
        taints=(Taint("gpu", "x", "NoSchedule"),),
        is_closed=True,
        is_ready=False,
        slices=80,
        reported=NOON,
    )
    assert expected == decode_cluster_node(raw(node), frozenset({"zone", "absent"}))


def test_the_handshake_dates_a_report_whose_cordon_was_removed():
    times = {REGISTER: "2026-01-02T11:00:00Z", "hami.io/node-handshake": "2026-01-02T12:00:00Z"}
    node = {"metadata": {"managedFields": [managed(key, time) for key, time in times.items()]}}

    assert NOON == decode_cluster_node(raw(node), frozenset()).reported


def test_a_node_of_another_shape_is_an_empty_one():
    node = {"metadata": {"name": 3}, "spec": [], "status": {"allocatable": {"nvidia.com/gpu": 1}}}

    assert ClusterNode("") == decode_cluster_node(raw(node), frozenset())


@pytest.mark.parametrize(
    ("statuses", "passed"),
    [
        ([], False),
        ([{"state": {"terminated": {"exitCode": 0}}}], True),
        ([{"state": {"terminated": {"exitCode": 1}}}], False),
        ([{"state": {"running": {}}}, {"state": {"terminated": {"exitCode": 0}}}], False),
    ],
)
def test_a_pod_with_gpus_is_kept_with_its_shares(statuses: list, *, passed: bool):
    marks = {"hami.io/vgpu-node": "n1", "hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,1,2:;"}
    pod = {
        "metadata": {
            "uid": "u",
            "namespace": "d",
            "name": "p",
            "annotations": marks,
            "deletionTimestamp": "2026-01-02T12:00:00Z",
        },
        "spec": {"initContainers": [{"name": "i"}]},
        "status": {"phase": "Running", "initContainerStatuses": statuses},
    }
    shares = "GPU-a,NVIDIA,1,2:;"
    expected = GpuHolder("u", "d", "p", "n1", shares, "Running", 1, passed, is_deleted=True)

    assert expected == decode_holder(raw(pod))


def test_of_a_quota_names_and_limits_are_kept():
    quota = {
        "metadata": {"namespace": "d", "name": "q", "uid": "u"},
        "spec": {"hard": {"limits.nvidia.com/gpumem": "4k", "x": 3, "y": [1]}},
    }
    expected = {
        "metadata": {"namespace": "d", "name": "q"},
        "spec": {"hard": {"limits.nvidia.com/gpumem": "4k", "x": 3}},
    }

    assert expected == decode_quota(raw(quota))


@pytest.mark.parametrize(
    ("parts", "last", "count", "writer"),
    [
        ({"lastTimestamp": "2026-01-02T12:00:00Z", "count": 3}, NOON, 3, ""),
        (
            {"eventTime": "2026-01-02T12:00:00Z", "reportingComponent": "kubelet"},
            NOON,
            1,
            "kubelet",
        ),
        (
            {
                "series": {"count": 4, "lastObservedTime": "2026-01-02T12:00:00.000000Z"},
                "source": {"component": "hami-scheduler"},
            },
            NOON,
            4,
            "hami-scheduler",
        ),
        ({"metadata": {"creationTimestamp": "2026-01-02T12:00:00Z"}, "count": "x"}, NOON, 1, ""),
        ({"lastTimestamp": "noon"}, None, 1, ""),
    ],
)
def test_an_event_of_either_form_has_a_last_time(
    parts: dict, last: dt.datetime | None, count: int, writer: str
):
    event = {"type": "Warning", "reason": "FilteringFailed", "message": "no"} | parts

    assert PodEventView("Warning", "FilteringFailed", "no", writer, last, count) == (
        decode_pod_event(raw(event))
    )


def test_the_pod_to_explain_always_has_its_three_parts():
    pod = {"metadata": {"name": "p", "annotations": {"a": "b", "c": 3}, "labels": None}, "spec": 1}

    expected = {
        "metadata": {"name": "p", "annotations": {"a": "b"}, "labels": {}},
        "spec": {},
        "status": {},
    }
    assert expected == decode_target(raw(pod))


@pytest.mark.parametrize(
    ("parts", "at"),
    [
        ({"startTime": "2026-01-02T12:00:00Z"}, NOON),
        ({}, NOON - dt.timedelta(hours=1)),
        ({"startTime": "noon"}, NOON - dt.timedelta(hours=1)),
    ],
)
def test_a_refused_pod_has_the_message_of_its_kubelet(parts: dict, at: dt.datetime):
    created = "2026-01-02T11:00:00Z"
    pod = {
        "metadata": {"namespace": "d", "name": "p", "creationTimestamp": created},
        "spec": {"nodeName": "n1"},
        "status": {"reason": "UnexpectedAdmissionError", "message": "no [HA-4002]"} | parts,
    }

    assert RefusedPod("d", "p", "n1", "no [HA-4002]", at) == decode_refused(raw(pod))


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}, "Ready"),
        (
            {"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]},
            "Running, not ready",
        ),
        ({"phase": "Pending"}, "Pending"),
        (
            {
                "phase": "Running",
                "containerStatuses": [
                    {"state": {"running": {}}},
                    {"state": {"waiting": {"reason": "CrashLoopBackOff"}}},
                ],
            },
            "CrashLoopBackOff",
        ),
    ],
)
def test_an_agents_pod_is_ready_or_says_what_it_waits_for(status: dict, state: str):
    metadata = {"namespace": "kube-system", "name": "agent-x"}
    volumes = [{"emptyDir": {}}, {"hostPath": {"path": "/data/kubelet/device-plugins/"}}]
    spec = {"nodeName": "n1", "volumes": volumes}
    pod = {"metadata": metadata, "spec": spec, "status": status}

    assert AgentPod("n1", "kube-system/agent-x", state) == decode_agent(raw(pod))


def test_a_name_is_read_from_the_metadata_alone():
    assert ("d", "p") == decode_name(raw({"metadata": {"namespace": "d", "name": "p"}}))


@pytest.mark.parametrize(
    ("decode", "pod"),
    [
        (decode_holder, {"metadata": {"annotations": {"other": "x"}}}),
        (decode_refused, {"status": {"reason": "Evicted"}}),
        # The label alone makes no agent.
        *(
            (decode_agent, {"metadata": {"name": "agent-x"}, "spec": {"volumes": volumes}})
            for volumes in (None, [], [{"hostPath": {"path": "/var/lib/kubelet"}}], [3])
        ),
    ],
)
def test_a_pod_of_another_kind_is_none(decode, pod):
    assert decode(raw(pod)) is None


@pytest.mark.parametrize(
    "decode", [decode_target, decode_holder, decode_quota, decode_name, decode_refused]
)
def test_what_is_no_object_is_refused(decode):
    with pytest.raises(MalformedText):
        decode(b"[]")


@pytest.mark.parametrize("text", [None, "", 3, "yesterday"])
def test_what_is_no_time_is_none(text: object):
    assert decode_moment(text) is None


def test_a_snapshot_knows_which_part_is_missing():
    snapshot = ClusterSnapshot({}, NOON, unread=(Unread("nodes", "no right"),))

    assert (False, True) == (snapshot.has("nodes"), snapshot.has("pods"))
