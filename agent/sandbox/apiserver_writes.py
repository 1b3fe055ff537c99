"""Performs writes of the API server: patches, subresources, bindings, deletions."""

from collections.abc import Callable, Mapping
from typing import Final

from agent.sandbox.api_errors import (
    BadRequestError,
    InvalidError,
    Json,
    UnclassifiedError,
    UnsupportedMediaTypeError,
)
from agent.sandbox.apiserver_access import Target
from agent.sandbox.apiserver_checks import check_changed, check_new, parse_json, parse_object
from agent.sandbox.apiserver_paths import number
from agent.sandbox.patching import json_patch, merge_patch, strategic_merge_patch
from agent.sandbox.store import KINDS, ObjectStore

Restrict = Callable[[Json | None, Json], None]
"""Raises ForbiddenError if the user may not change the first into the second, see `restrict`."""

JSON_PATCH: Final = "application/json-patch+json"
_MERGES: Final[Mapping[str, Callable[[Json, Json], Json]]] = {
    "application/merge-patch+json": merge_patch,
    "application/strategic-merge-patch+json": strategic_merge_patch,
}
_NOT_DECODED: Final = "error decoding patch"


def patch(
    store: ObjectStore, target: Target, content_type: str, body: bytes, restrict: Restrict
) -> Json:
    """Apply one PATCH with the preconditions `metadata.resourceVersion` and `metadata.uid`.

    A status patch keeps the spec, a plain patch keeps the status, and both store metadata
    (kube-apiserver: pkg/registry/core/pod/strategy.go, .../node/strategy.go).

    Raises:
        StatusError: as the real server would refuse it.
    """
    apply = _patcher(content_type, body)
    return _write(store, target, apply, restrict)


def replace(store: ObjectStore, target: Target, body: bytes, restrict: Restrict) -> Json:
    """Replace an object. Without a version in the body, it replaces any version.

    Raises:
        StatusError: as the real server would refuse it.
    """
    given = parse_object(body, KINDS[target.resource])
    metadata = given.get("metadata") or {}
    uid = metadata.pop("uid", None)
    return _write(store, target, lambda stored: _complete(stored, given), restrict, uid)


def create(
    store: ObjectStore,
    target: Target,
    body: bytes,
    restrict: Restrict,
    admit: Callable[[Json], Json] | None = None,
) -> Json:
    """Create an object, or bind a pod if the target is `pods/binding`. `admit` gets new pods.

    Raises:
        StatusError: as the real server would refuse it.
    """
    if target.full_resource == "pods/binding":
        return _bind(store, target, parse_object(body, "Binding"))
    given = parse_object(body, KINDS[target.resource])
    metadata = given.setdefault("metadata", {})
    check_new(target, given)
    if target.namespace:
        metadata.setdefault("namespace", target.namespace)
    if admit is not None and target.resource == "pods":
        given = admit(given)
    if target.resource == "pods":
        given.pop("status", None)
    restrict(None, given)
    return store.create(target.resource, given)


def delete(store: ObjectStore, target: Target, body: bytes) -> Json:
    """Delete an object, with the grace period and the preconditions of the body's DeleteOptions.

    Raises:
        StatusError: as the real server would refuse it.
    """
    options = parse_object(body, "DeleteOptions") if body else {}
    grace = options.get("gracePeriodSeconds")
    if grace is None and "gracePeriodSeconds" in target.options:
        grace = number(target.options, "gracePeriodSeconds")
    held = options.get("preconditions") or {}
    gone = store.delete(
        *(target.resource, target.namespace, target.name),
        grace=grace,
        uid=held.get("uid"),
        version=held.get("resourceVersion"),
    )
    if target.resource == "pods":
        return gone
    details = {"name": target.name, "kind": target.resource, "uid": gone["metadata"]["uid"]}
    return _success() | {"details": details}


def _write(
    store: ObjectStore,
    target: Target,
    apply: Callable[[Json], Json],
    restrict: Restrict,
    uid: str | None = None,
) -> Json:
    def change(stored: Json) -> Json:
        fresh = apply(stored)
        if target.subresource == "status":
            _keep("spec", stored, fresh)
        check_changed(target, stored, fresh)
        if not target.subresource:
            _keep("status", stored, fresh)
        restrict(stored, fresh)
        return fresh

    return store.update(target.resource, target.namespace, target.name, change, uid=uid)


def _patcher(content_type: str, body: bytes) -> Callable[[Json], Json]:
    if content_type == JSON_PATCH:
        operations = parse_json(body, _NOT_DECODED)
        if not isinstance(operations, list):
            raise BadRequestError(_NOT_DECODED + _cannot(operations, "[]handlers.jsonPatchOp"))
        for operation in operations:
            if not isinstance(operation, dict):
                raise BadRequestError(_NOT_DECODED + _cannot(operation, "handlers.jsonPatchOp"))
        return lambda stored: _apply_operations(stored, operations)
    if content_type not in _MERGES:
        raise UnsupportedMediaTypeError("415: Unsupported Media Type")
    changes, merge = parse_json(body, _NOT_DECODED), _MERGES[content_type]
    if not isinstance(changes, dict):
        raise BadRequestError(_NOT_DECODED + _cannot(changes, "map[string]interface {}"))
    return lambda stored: merge(stored, changes)


def _apply_operations(stored: Json, operations: list[Json]) -> Json:
    try:
        return json_patch(stored, operations)
    except InvalidError as failed:  # the real server does not name the operation
        text = "the server rejected our request due to an error in our request"
        raise InvalidError(text) from failed


def _bind(store: ObjectStore, target: Target, given: Json) -> Json:
    metadata, whereto = given.get("metadata") or {}, given.get("target") or {}
    if metadata.get("name") != target.name:
        raise BadRequestError("name in URL does not match name in Binding object")
    kind = whereto.get("kind", "")
    if kind not in ("", "Node"):
        known = 'supported values: "Node", "<empty>"'
        raise UnclassifiedError(f'target.kind: Unsupported value: "{kind}": {known}')
    if not whereto.get("name"):
        raise UnclassifiedError("target.name: Required value")
    store.bind(
        *(target.namespace, target.name, whereto["name"]),
        uid=metadata.get("uid"),
        annotations=metadata.get("annotations"),
    )
    return _success()


def _complete(stored: Json, given: Json) -> Json:
    """`given` with the kind and the server's metadata of `stored`."""
    named = {"kind": stored["kind"], "apiVersion": stored["apiVersion"]}
    return given | named | {"metadata": dict(given.get("metadata") or {})}


def _keep(part: str, stored: Json, fresh: Json) -> None:
    if part in stored:
        fresh[part] = stored[part]
    else:
        fresh.pop(part, None)


def _cannot(value: object, wanted: str) -> str:
    words: dict[type, str] = {dict: "object", list: "array", str: "string", bool: "bool"}
    word = words.get(type(value), "number")
    return f": json: cannot unmarshal {word} into Go value of type {wanted}"


def _success() -> Json:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
