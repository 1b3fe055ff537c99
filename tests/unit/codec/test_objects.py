"""Pods and Nodes of the API server to views: each field, quantities, and who wrote what.

What is kept of the objects of a cluster, and what counts as absent.
"""

import ast
import datetime as dt
import itertools
from typing import Any

import pytest
import yaml
from msgspec.structs import astuple, replace

from agent.cluster import NOT_WHOLE, REGISTER, NodeView, PodView
from agent.errors import MalformedText
from agent.kube.objects import decode_node, decode_pod, decode_quantity
from agent.kube.reader import ListedPod, annotation_writes, decode_listed, decode_pod_event
from tests.builders import POD_UID
from tests.unit.rows import rows_of

GPU = "nvidia.com/gpu"
BOUND = [{"type": "PodScheduled", "status": "True"}]
AT = "2026-09-01T12:00:07Z"


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


def ended(exit: int, policy: str, kind: str = "containers", own: Any = None) -> dict[str, Any]:  # noqa: A002
    """The parts of a pod whose only container has ended."""
    status: dict[str, Any] = {"name": "main", "containerID": "c://x"}
    status["state"] = {"terminated": {"exitCode": exit, "finishedAt": AT}}
    spec = {"restartPolicy": policy, "containers": [], kind: [{"name": "main"} | (own or {})]}
    return {"spec": spec, "status": {f"{kind.removesuffix('s')}Statuses": [status]}}


def view_of(words: str) -> PodView:
    """The pod that a row of the table describes."""
    kind, _, text = words.partition(" ")
    part = yaml.safe_load(text)
    match kind:
        case "env":
            return container(env=part)
        case "ended":
            return decode_pod(pod_object(**ended(**part)), GPU)
        case "state":
            kind, part = "status", {"containerStatuses": [{"name": "main", **part}]}
    return decode_pod(pod_object(**{kind: part}), GPU)


def other_told(kind: str, part: Any) -> object:
    """What is kept of an Event, of managed fields and of the volumes of another pod."""
    match kind:
        case "event":
            event = {"type": "Warning", "reason": "FilteringFailed", "message": "no"} | part
            one = decode_pod_event(event)
            assert ("Warning", "FilteringFailed", "no") == astuple(one)[:3]
            return f"{one.last and one.last.isoformat()} {one.writer}".strip()
        case "managed":
            return [*annotation_writes({"managedFields": part})]
    spec, labels = (
        {"nodeName": "n1", "volumes": part},
        {"app.kubernetes.io/component": "hami-agent"},
    )
    pod = {"metadata": {"namespace": "d", "name": "p", "labels": labels}, "spec": spec}
    found = decode_listed(pod)
    assert ListedPod("d", "p", "n1") == replace(found, is_plugin=False)
    return found.is_plugin


def told(view: PodView, field: str) -> Any:
    """What of the view a row names."""
    one = view.containers[0]
    match field:
        case "told":
            return ", ".join(f"{c.role.value} {c.name} {c.count}" for c in view.containers)
        case "unkept":
            return view.unkept("main")
        case "ended":
            return one.ended_at == dt.datetime.fromisoformat(AT)
        case "groups":
            return view.groups and tuple(tuple(map(astuple, group)) for group in view.groups)
    return getattr(view, field) if hasattr(view, field) else getattr(one, field)


@pytest.mark.parametrize(("words", "expected"), rows_of(__file__, "pods.txt"))
def test_a_pod_is_taken_for_what_the_table_says(words: str, expected: str):
    if words.startswith("quantity "):
        assert ast.literal_eval(expected) == decode_quantity(
            words.removeprefix("quantity ").strip("'")
        )
        return
    kind, _, text = words.partition(" ")
    if kind in {"event", "managed", "volumes"}:
        assert ast.literal_eval(expected) == other_told(kind, yaml.safe_load(text))
        return
    view = view_of(words)
    for part in expected.split(" & "):
        field, relation, value = part.split(" ", 2)
        found, wanted = told(view, field), ast.literal_eval(value)
        assert wanted in found if relation == "~" else wanted == found


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
