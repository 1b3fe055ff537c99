"""The requests of kube-scheduler and kube-apiserver, and the answers.

kube-scheduler's types (k8s.io/kube-scheduler/extender/v1) have no JSON names. The keys are the
names of Go's fields in any case, and empty fields are also written.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from agent.core.errors import MalformedText, cap
from agent.sandbox.api_errors import Json
from agent.sandbox.patching import difference
from agent.sandbox.scheduler.filter import Filtered
from agent.sandbox.scheduler.webhook import WebhookAdmission

_BAD_REQUEST: Final = 400
_Message = TypeVar("_Message", bound=msgspec.Struct)


class _Resources(msgspec.Struct):
    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None


class _SecurityContext(msgspec.Struct):
    privileged: bool | None = None


class _Container(msgspec.Struct, rename="camel"):
    name: str
    resources: _Resources | None = None
    env: list[dict[str, Any]] | None = None
    security_context: _SecurityContext | None = None


class _Spec(msgspec.Struct, rename="camel"):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    scheduler_name: str | None = None
    node_name: str | None = None
    runtime_class_name: str | None = None


class _Annotations(msgspec.Struct):
    annotations: dict[str, str] | None = None


class _NewPod(msgspec.Struct):
    """The part of a pod before admission that the webhook reads."""

    spec: _Spec
    metadata: _Annotations


class _PodName(_Annotations, kw_only=True):
    name: str
    namespace: str
    uid: str


class _Pod(msgspec.Struct):
    """The part of a stored pod that filter reads."""

    spec: _Spec
    metadata: _PodName


class _NodeName(_Annotations, kw_only=True):
    name: str


class _Node(msgspec.Struct):
    metadata: _NodeName


class _Nodes(msgspec.Struct):
    items: list[_Node]


class FilterArgs(msgspec.Struct):
    """ExtenderArgs: `nodes` if the caller wants a simulation, else `nodenames`."""

    pod: dict[str, Any] | None = None
    nodes: dict[str, Any] | None = None
    nodenames: list[str] | None = None


class BindArgs(msgspec.Struct):
    """ExtenderBindingArgs."""

    podname: str
    podnamespace: str
    poduid: str
    node: str


class AdmissionRequest(msgspec.Struct):
    """The part of an AdmissionRequest that the webhook reads."""

    uid: str
    object: dict[str, Any] | None = None


class AdmissionReview(msgspec.Struct, rename="camel"):
    """An AdmissionReview that asks. The answer has the same `api_version`."""

    api_version: str
    request: AdmissionRequest


def read_filter(body: bytes) -> FilterArgs:
    """Parse kube-scheduler's request to filter. Raises MalformedText."""
    args = _convert(_folded(body), FilterArgs)
    if args.pod is not None:
        _convert(args.pod, _Pod)
    if args.nodes is not None:
        args.nodes["items"] = args.nodes.get("items") or []
        _convert(args.nodes, _Nodes)
    return args


def read_bind(body: bytes) -> BindArgs:
    """Parse kube-scheduler's request to bind. Raises MalformedText."""
    return _convert(_folded(body), BindArgs)


def read_review(body: bytes) -> AdmissionReview:
    """Parse kube-apiserver's request to a webhook. Raises MalformedText."""
    return _convert(_parse(body), AdmissionReview)


def new_pod(request: AdmissionRequest) -> Json:
    """The pod under review. Raises MalformedText: the object is not a pod."""
    _convert(request.object, _NewPod)
    return request.object or {}


def filter_result(filtered: Filtered) -> Json:
    """ExtenderFilterResult: the nodes that passed, or why none did."""
    passed = bool(filtered.nodes)
    return _result(
        NodeNames=list(filtered.nodes) if passed else None,
        FailedNodes=None if passed else dict(filtered.failed) or None,
        Error=filtered.error,
    )


def simulation_result(filtered: Filtered, nodes: Sequence[Json]) -> Json:
    """ExtenderFilterResult for a request with whole nodes. Without a GPU request it is empty."""
    if filtered.error:
        return _result(Error=filtered.error)
    if filtered.groups is None:
        return _result(FailedNodes=None if filtered.nodes else dict(filtered.failed))
    items = [node for node in nodes if node["metadata"]["name"] in filtered.nodes]
    return _result(Nodes={"metadata": {}, "items": items[:1]}, FailedNodes=dict(filtered.failed))


def _result(**fields: object) -> Json:
    empty = {"Nodes": None, "NodeNames": None, "FailedNodes": None}
    return empty | {"FailedAndUnresolvableNodes": None, "Error": ""} | fields


def bind_result(error: str = "") -> Json:
    """ExtenderBindingResult."""
    return {"Error": error}


def review_answer(review: AdmissionReview, admission: WebhookAdmission, pod: Json) -> Json:
    """The AdmissionReview that answers; `pod` is the pod of the request."""
    response: Json = {"uid": review.request.uid, "allowed": admission.is_allowed}
    if admission.message:
        response["status"] = {"code": admission.code, "message": admission.message}
    changes = difference(pod, admission.pod) if admission.is_allowed else []
    if changes:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(changes).encode()).decode()
    return {"apiVersion": review.api_version, "kind": "AdmissionReview", "response": response}


def undecodable(pod: Json, error: MalformedText) -> WebhookAdmission:
    """The refusal of an object that is not a pod."""
    return WebhookAdmission(pod, is_allowed=False, code=_BAD_REQUEST, message=str(error))


def _folded(body: bytes) -> Json:
    return {key.lower(): value for key, value in _parse(body).items()}


def _parse(body: bytes) -> Json:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedText(f"the body is no JSON object: {cap(str(error), 128)}") from error


def _convert(value: object, kind: type[_Message]) -> _Message:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise MalformedText(f"the body has another shape: {cap(str(error), 128)}") from error
