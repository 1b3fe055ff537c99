"""What a write through the API server may change: patches, subresources, bindings, deletions."""

import json
from collections.abc import Callable, Mapping
from typing import Final

from agent.sandbox.api_errors import (
    BadRequestError,
    InvalidError,
    Json,
    MethodNotAllowedError,
    UnsupportedMediaTypeError,
)
from agent.sandbox.apiserver_access import Target
from agent.sandbox.patching import json_patch, merge_patch, strategic_merge_patch
from agent.sandbox.store import ObjectStore

JSON_PATCH: Final = "application/json-patch+json"
_MERGES: Final[Mapping[str, Callable[[Json, Json], Json]]] = {
    "application/merge-patch+json": merge_patch,
    "application/strategic-merge-patch+json": strategic_merge_patch,
}
PATCHABLE: Final = frozenset({"nodes", "nodes/status", "pods", "pods/status", "events"})


def parse_body(body: bytes) -> Json:
    """The JSON object of a request.

    Raises:
        BadRequestError: no JSON, or JSON that is no object.
    """
    value = _parse(body)
    if not isinstance(value, dict):
        raise BadRequestError("the body must be a JSON object")
    return value


def patch(store: ObjectStore, target: Target, content_type: str, body: bytes) -> Json:
    """Apply one PATCH, with the preconditions in its `metadata.uid` and `…resourceVersion`.

    A status patch keeps the spec and a plain patch keeps the status, but both store metadata
    (kube-apiserver: pkg/registry/core/pod/strategy.go, .../node/strategy.go).

    Raises:
        StatusError: as the real server would refuse it.
    """
    if target.full_resource not in PATCHABLE:
        raise MethodNotAllowedError(f"{target.full_resource} cannot be patched")
    if content_type == JSON_PATCH:
        operations = _parse(body)
        if not isinstance(operations, list):
            raise BadRequestError("a JSON patch must be a list of operations")
        apply: Callable[[Json], Json] = lambda stored: json_patch(stored, operations)  # noqa: E731
        preconditions: Json = {}
    elif content_type in _MERGES:
        changes = parse_body(body)
        merge = _MERGES[content_type]
        apply = lambda stored: merge(stored, changes)  # noqa: E731
        preconditions = changes.get("metadata") or {}
    else:
        raise UnsupportedMediaTypeError(
            f"the body of the request was in an unknown format: {content_type[:128]}"
        )
    return store.update(
        target.resource,
        target.namespace,
        target.name,
        lambda stored: _confine(target, stored, apply(stored)),
        uid=preconditions.get("uid"),
        resource_version=preconditions.get("resourceVersion"),
    )


def create(
    store: ObjectStore, target: Target, body: bytes, admit: Callable[[Json], Json] | None = None
) -> Json:
    """Create an object, or bind a pod when the target is `pods/binding`; `admit` sees new pods.

    Raises:
        StatusError: as the real server would refuse it.
    """
    given = parse_body(body)
    if target.full_resource == "pods/binding":
        node_name = (given.get("target") or {}).get("name")
        if not node_name:
            raise InvalidError("target.name: Required value")
        uid = (given.get("metadata") or {}).get("uid")
        store.bind(target.namespace, target.name, node_name, uid=uid)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    if target.subresource or target.name:
        raise MethodNotAllowedError(f"{target.full_resource} cannot be created")
    metadata = given.setdefault("metadata", {})
    if target.namespace and metadata.setdefault("namespace", target.namespace) != target.namespace:
        raise BadRequestError("the namespace of the object does not match the request")
    if admit is not None and target.resource == "pods":
        given = admit(given)
    return store.create(target.resource, given)


def delete(store: ObjectStore, target: Target, body: bytes) -> Json:
    """Delete an object, with the grace period and the preconditions of the body's DeleteOptions.

    Raises:
        StatusError: as the real server would refuse it.
    """
    if target.subresource or not target.name:
        raise MethodNotAllowedError(f"{target.full_resource} cannot be deleted")
    options = parse_body(body) if body else {}
    grace = options.get("gracePeriodSeconds")
    uid = (options.get("preconditions") or {}).get("uid")
    return store.delete(target.resource, target.namespace, target.name, grace=grace, uid=uid)


def _confine(target: Target, stored: Json, patched: Json) -> Json:
    named = patched.get("metadata", {})
    if named.get("name") != target.name:
        raise BadRequestError(f"the name of the object ({named.get('name')}) cannot be changed")
    if target.subresource == "status":
        return patched | {"spec": stored["spec"]} if "spec" in stored else patched
    if target.resource == "pods" and patched.get("spec") != stored.get("spec"):
        detail = "spec: Forbidden: pod updates may not change fields other than `spec.tolerations`"
        raise InvalidError(f'Pod "{target.name}" is invalid: {detail}')
    return patched | {"status": stored["status"]} if "status" in stored else patched


def _parse(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError as malformed:
        raise BadRequestError(f"couldn't read the body: {malformed}"[:256]) from malformed
