"""What is kept of the objects of a cluster, and what counts as absent."""

import datetime as dt

import msgspec
import pytest

from agent.kube.reader import (
    ClusterNode,
    ListedPod,
    PodEventView,
    Taint,
    decode_cluster_node,
    decode_listed,
    decode_pod_event,
)

NOON = dt.datetime(2026, 1, 2, 12, tzinfo=dt.UTC)
REGISTER = "hami.io/node-nvidia-register"


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
        "status": {"allocatable": {"nvidia.com/gpu": "80"}},
    }

    expected = ClusterNode(
        name="n1",
        annotations={REGISTER: "[]", "hami.io/mutex.lock": "l"},
        labels={"zone": "a", "other": "b"},
        taints=(Taint("gpu", "x", "NoSchedule"),),
        is_closed=True,
        slices=80,
        reported=NOON,
    )
    assert expected == decode_cluster_node(node)


def test_a_node_of_another_shape_is_an_empty_one():
    node = {"metadata": {"name": 3}, "spec": [], "status": {"allocatable": {"nvidia.com/gpu": 1}}}

    assert ClusterNode("") == decode_cluster_node(node)


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
    found = decode_listed(pod)

    assert ("u", "d", "p", "Running") == (found.uid, found.namespace, found.name, found.phase)
    assert ("n1", shares, 1) == (found.chosen, found.shares, found.inits)
    assert (passed, True) == (found.has_passed_init, found.is_deleted)


@pytest.mark.parametrize(
    ("parts", "last", "writer"),
    [
        ({"lastTimestamp": "2026-01-02T12:00:00Z"}, NOON, ""),
        ({"eventTime": "2026-01-02T12:00:00Z", "reportingComponent": "kubelet"}, NOON, "kubelet"),
        (
            {
                "series": {"lastObservedTime": "2026-01-02T12:00:00.000000Z"},
                "source": {"component": "hami-scheduler"},
            },
            NOON,
            "hami-scheduler",
        ),
        ({"metadata": {"creationTimestamp": "2026-01-02T12:00:00Z"}}, NOON, ""),
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
