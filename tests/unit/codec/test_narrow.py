"""What is read of a pod field by field is what the agent looks at, and nothing else is kept."""

import json
from typing import Any

import pytest

from agent.cluster import ALLOCATED, BIND_PHASE, BIND_TIME, MIRROR, TO_ALLOCATE, VGPU_NODE
from agent.errors import MalformedText
from agent.kube.objects import decode_pod, read_frame, read_page, read_page_head, read_pod
from tests.builders import G1

GPU = "nvidia.com/gpu"
STATE = {
    "running": {"startedAt": "2026-09-01T12:00:00Z"},
    "terminated": {"exitCode": 0, "finishedAt": "2026-09-01T12:00:07Z"},
}


def container(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "image": "cuda",
        "command": ["sh", "-c", "x" * 1000],
        "restartPolicy": "Always",
        "restartPolicyRules": [{"action": "Restart"}],
        "env": [
            {"name": "CUDA_DISABLE_CONTROL", "value": "true"},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {
                "name": "CUDA_TASK_PRIORITY",
                "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}},
            },
            {"name": "GPU_CORE_UTILIZATION_POLICY", "value": "force"},
        ],
        "resources": {
            "limits": {GPU: "2", "nvidia.com/gpumem": "99999999999", "other.com/x": 3},
            "requests": {"cpu": "1"},
        },
    }


def status(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "containerID": "containerd://abc",
        "image": "cuda",
        "state": STATE,
        "lastState": STATE,
    }


POD: dict[str, Any] = {
    "kind": "Pod",
    "metadata": {
        "uid": "u",
        "name": "train-0",
        "namespace": "team-a",
        "generateName": "train-",
        "resourceVersion": "7",
        "creationTimestamp": "2026-09-01T12:00:00Z",
        "annotations": {
            ALLOCATED: f"{G1},NVIDIA,3000,30:;",
            TO_ALLOCATE: f"{G1},NVIDIA,3000,30:;",
            BIND_PHASE: "allocating",
            BIND_TIME: "1788264000",
            VGPU_NODE: "node-a",
            MIRROR: "x",
        },
        "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}] * 50,
    },
    "spec": {
        "nodeName": "node-a",
        "schedulerName": "hami-scheduler",
        "runtimeClassName": "gvisor",
        "restartPolicy": "OnFailure",
        "initContainers": [container("init")],
        "containers": [container("main")],
        "volumes": [{"name": "v"}] * 50,
    },
    "status": {
        "phase": "Running",
        "startTime": "2026-09-01T12:00:00Z",
        "reason": "because",
        "message": "of this",
        "conditions": [{"type": "PodScheduled", "status": "True", "reason": "x"}],
        "initContainerStatuses": [status("init")],
        "containerStatuses": [status("main")],
    },
}


def encoded(obj: object) -> bytes:
    return json.dumps(obj).encode()


def test_nothing_that_the_view_shows_is_passed_over():
    # Fill in the field here that decode_pod learns to look at.
    narrow = read_pod(encoded(POD))

    assert decode_pod(POD, GPU) == decode_pod(narrow, GPU)
    assert {"metadata", "spec", "status"} == set(narrow)
    assert "managedFields" not in narrow["metadata"]
    assert set(POD["spec"]) - {"volumes"} == set(narrow["spec"])
    assert [{"type": "PodScheduled", "status": "True"}] == narrow["status"]["conditions"]
    assert "command" not in narrow["spec"]["containers"][0]


@pytest.mark.parametrize(
    "part",
    [
        {"spec": None, "status": None},
        {"spec": {"containers": "none", "nodeName": "node-a"}},
        {"spec": {"containers": [7, {"name": "main", "env": {}}]}},
        {"status": {"containerStatuses": {"name": "main"}}},
        {"status": {"conditions": [7, {"type": "PodScheduled", "status": "True"}]}},
    ],
)
def test_a_pod_of_an_odd_shape_is_read_as_before(part: dict[str, Any]):
    odd = POD | part

    assert decode_pod(odd, GPU) == decode_pod(read_pod(encoded(odd)), GPU)


@pytest.mark.parametrize("body", [b"[]", b"7", b"{", b'{"metadata": {"name": "\xff"}}'])
def test_what_is_no_object_is_malformed(body: bytes):
    with pytest.raises(MalformedText, match="not a JSON object"):
        read_pod(body)


def test_a_page_says_how_to_go_on():
    body = encoded({"metadata": {"resourceVersion": "7", "continue": "t"}, "items": [POD, {}]})

    page = read_page(body)

    assert ("7", "t", 2) == (page.version, page.rest, len(page.items))
    assert read_pod(page.items[0]) == read_pod(encoded(POD))


def test_an_empty_list_may_have_null_for_items():
    assert () == read_page(b'{"metadata":{"resourceVersion":"7"},"items":null}').items


def test_the_beginning_of_a_page_says_how_to_go_on():
    begun = b'{"kind":"PodList","metadata":{"resourceVersion":"7","continue":"t"},"items":[{"meta'

    page = read_page_head(begun)

    assert ("7", "t", ()) == (page.version, page.rest, page.items)


def test_a_beginning_without_items_is_malformed():
    with pytest.raises(MalformedText, match="does not begin"):
        read_page_head(b'{"kind":"PodList"')


def test_a_frame_has_a_type_and_an_object():
    kind, obj = read_frame(encoded({"type": "ADDED", "object": POD}))

    assert "ADDED" == kind
    assert read_pod(obj) == read_pod(encoded(POD))


@pytest.mark.parametrize(
    "line", [b'{"type":"ADDED"}', b'{"type":"A","object":7}', b'{"object":{}}']
)
def test_a_frame_without_one_of_them_is_malformed(line: bytes):
    with pytest.raises(MalformedText, match="no type or no object"):
        read_frame(line)
