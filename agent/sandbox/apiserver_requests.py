"""One request to the API server: which object it names, what it reads, and what it writes.

There are no schemas. The store keeps objects as given, and only the rules that a client of this
project can meet are checked.
"""

import base64
import json
from collections.abc import Callable, Mapping
from typing import Final

from agent.cluster import Selector, parse_selector
from agent.errors import MalformedText
from agent.sandbox.api_errors import (
    BadRequestError,
    ConflictError,
    InvalidError,
    Json,
    NotFoundError,
)
from agent.sandbox.apiserver_access import Target
from agent.sandbox.patching import json_patch, merge_patch, strategic_merge_patch
from agent.sandbox.store import CLUSTER_SCOPED, KINDS, ObjectStore

Restrict = Callable[[Json | None, Json | None], None]
"""Raises ForbiddenError if the user may not change the first into the second, see `restrict`."""

JSON_PATCH: Final = "application/json-patch+json"
_MERGES: Final[Mapping[str, Callable[[Json, Json], Json]]] = {
    "application/merge-patch+json": merge_patch,
    "application/strategic-merge-patch+json": strategic_merge_patch,
}
_VERBS: Final = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
_SERVED: Final[Mapping[str, frozenset[str]]] = {
    "nodes/status": frozenset({"get", "patch"}),
    "pods/status": frozenset({"get", "patch"}),
    "pods/binding": frozenset({"create"}),
}
_TOO_LONG: Final = 256 * 1024
"""The most bytes of all annotations of one object, keys and values."""


def parse_target(method: str, path: str, query: Mapping[str, str]) -> Target:
    """Parse a request below `/api/v1`, whether its resource is served or not.

    Raises:
        NotFoundError: no such path.
        BadRequestError: a selector that this model does not evaluate.
    """
    parts = path.strip("/").split("/")
    if parts[:2] != ["api", "v1"]:
        raise _no_path()
    parts = parts[2:]
    namespace = ""
    if len(parts) >= 3 and parts[0] == "namespaces":
        namespace, parts = parts[1], parts[2:]
    if not 1 <= len(parts) <= 3 or not parts[0]:
        raise _no_path()
    resource, name, subresource = [*parts, "", ""][:3]
    verb = _VERBS.get(method, method.lower())
    if method == "GET" and not name:
        verb = "watch" if is_set(query, "watch") else "list"
    if verb == "watch" and query.get("labelSelector"):
        raise BadRequestError("labelSelector of a watch is not evaluated by this server")
    fields = parse_fields(query.get("fieldSelector", ""))
    return Target(verb, resource, namespace, name, subresource, fields, dict(query))


def require_served(target: Target) -> None:
    """Check that this server serves the target. Call it after the check of permissions.

    Raises:
        NotFoundError: no such path.
    """
    is_global = target.resource in CLUSTER_SCOPED
    if (
        target.resource not in KINDS
        or (target.namespace and is_global)
        or (target.name and not target.namespace and not is_global)
        or (target.verb == "create" and not target.namespace and not is_global)
    ):
        raise _no_path()
    served = frozenset({"get", "patch", "delete"} if target.name else {"list", "watch", "create"})
    if target.subresource:
        served = _SERVED.get(target.full_resource, frozenset())
    if target.verb not in served:
        raise _no_path()


def parse_fields(selector: str) -> dict[str, str]:
    """Parse a field selector: value by label. A term `label!=value` is a key of its own.

    Raises:
        BadRequestError: a term without `=`.
    """
    fields = {}
    for term in filter(None, selector.split(",")):
        label, equals, value = term.partition("=")
        if not equals:
            raise BadRequestError(f"invalid selector: '{selector}'; can't understand '{term}'")
        if label.endswith("!"):
            fields[term] = ""
        else:
            fields[label] = value.removeprefix("=")
    return fields


def is_set(query: Mapping[str, str], name: str) -> bool:
    """Whether an option is present and neither `0` nor `false`. Any other value is true."""
    return name in query and query[name].lower() not in ("0", "false")


def number(query: Mapping[str, str], name: str) -> int:
    """Parse an option that is a number; 0 if it is absent.

    Raises:
        BadRequestError: it is not a number.
    """
    text = query.get(name) or "0"
    if not (text.isascii() and text.isdecimal()):
        raise BadRequestError(f"{name}={text[:64]} is not a number")
    return int(text)


def _no_path() -> NotFoundError:
    return NotFoundError("the server could not find the requested resource")


# Reads.


def list_objects(store: ObjectStore, target: Target) -> Json:
    """The list that a request asks for. All chunks of a list show the objects as of its beginning.

    Raises:
        BadRequestError: an option or a selector is malformed.
        GoneError: the list began too long ago.
    """
    limit, token = number(target.options, "limit"), target.options.get("continue", "")
    version, start = _opened(token) if token else (store.version, [])
    text = target.options.get("labelSelector", "")
    try:
        selector = parse_selector(text) if text else Selector()
    except MalformedText as malformed:
        raise BadRequestError(f"unable to parse requirement: {malformed}"[:256]) from malformed
    left = [
        item
        for item in store.select(
            target.resource,
            namespace=target.namespace or None,
            fields=target.fields,
            at=version if token else None,
        )
        if selector.matches(item["metadata"].get("labels") or {}) and _place(item) > start
    ]
    shown = left[:limit] if limit else left
    metadata: Json = {"resourceVersion": str(version)}
    if len(shown) < len(left):
        following = json.dumps([version, _place(shown[-1])])
        metadata["continue"] = base64.urlsafe_b64encode(following.encode()).decode()
    return {
        "kind": KINDS[target.resource] + "List",
        "apiVersion": "v1",
        "metadata": metadata,
        # Only the list names the kind.
        "items": [
            {key: value for key, value in item.items() if key not in ("kind", "apiVersion")}
            for item in shown
        ],
    }


def _place(item: Json) -> list[str]:
    return [item["metadata"].get("namespace", ""), item["metadata"]["name"]]


def _opened(token: str) -> tuple[int, list[str]]:
    try:
        version, start = json.loads(base64.urlsafe_b64decode(token))
        return int(version), list(start)
    except (ValueError, TypeError) as malformed:
        raise BadRequestError(f"invalid continue token: {malformed}"[:256]) from malformed


# Writes.


def parse_object(body: bytes) -> Json:
    """Parse a JSON object.

    Raises:
        BadRequestError: it is none.
    """
    value = _parse(body)
    if not isinstance(value, dict):
        raise BadRequestError("the body is not a JSON object")
    return value


def _parse(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError as malformed:
        raise BadRequestError(f"the body is not JSON: {malformed}"[:256]) from malformed


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
    given = parse_object(body)
    metadata = given.setdefault("metadata", {})
    if target.full_resource == "pods/binding":
        node = (given.get("target") or {}).get("name")
        if not node:
            raise BadRequestError("target.name: Required value")
        marks = metadata.get("annotations")
        name = target.name
        store.bind(target.namespace, name, node, uid=metadata.get("uid"), annotations=marks)
        return _success()
    if metadata.get("namespace", target.namespace) != target.namespace:
        raise BadRequestError("the namespace of the object is not the one of the request")
    _check_marks(target, metadata)
    if target.resource == "events":
        # An Event is in its object's namespace, or in `default` if that has none.
        about = (given.get("involvedObject") or {}).get("namespace", "")
        if about != target.namespace and (about or target.namespace != "default"):
            raise _invalid(target, "involvedObject.namespace: does not match event.namespace")
    if target.namespace:
        metadata["namespace"] = target.namespace
    if target.resource == "pods":
        given = given if admit is None else admit(given)
        given.pop("status", None)
    restrict(None, given)
    return store.create(target.resource, given)


def patch(
    store: ObjectStore, target: Target, content_type: str, body: bytes, restrict: Restrict
) -> Json:
    """Apply one PATCH with the preconditions `metadata.resourceVersion` and `metadata.uid`.

    A status patch keeps the spec, a plain patch keeps the status, and both store metadata
    (kube-apiserver: pkg/registry/core/pod/strategy.go, .../node/strategy.go).

    Raises:
        StatusError: as the real server would refuse it.
    """
    changes = _parse(body)

    def change(stored: Json) -> Json:
        if content_type == JSON_PATCH and isinstance(changes, list):
            fresh = json_patch(stored, changes)
        elif content_type in _MERGES and isinstance(changes, dict):
            fresh = _MERGES[content_type](stored, changes)
        else:
            raise BadRequestError(f"{content_type[:64]} and this body are no patch")
        kept = "spec" if target.subresource else "status"
        if target.full_resource == "pods" and fresh.get("spec") != stored.get("spec"):
            raise _invalid(target, "spec: Forbidden: a pod's spec cannot be patched here")
        fresh = {key: value for key, value in fresh.items() if key != kept}
        fresh |= {kept: stored[kept]} if kept in stored else {}
        held, given = stored["metadata"], fresh["metadata"]
        _check_marks(target, given)
        if given.get("resourceVersion") != held["resourceVersion"]:
            detail = "the object has been modified; please apply your changes to the latest version"
            refused = f'Operation cannot be fulfilled on {target.resource} "{target.name}": '
            raise ConflictError(refused + detail)
        if given.get("uid") != held["uid"]:
            raise _invalid(target, f'metadata.uid: Invalid value: "{given.get("uid")}"')
        restrict(stored, fresh)
        return fresh

    return store.update(target.resource, target.namespace, target.name, change)


def delete(store: ObjectStore, target: Target, body: bytes, restrict: Restrict) -> Json:
    """Delete an object, with the grace period and the preconditions of the body's DeleteOptions.

    Raises:
        StatusError: as the real server would refuse it.
    """
    options = parse_object(body) if body else {}
    grace = options.get("gracePeriodSeconds")
    if grace is None and "gracePeriodSeconds" in target.options:
        grace = number(target.options, "gracePeriodSeconds")
    held = options.get("preconditions") or {}
    where = (target.resource, target.namespace, target.name)
    restrict(store.get(*where), None)
    uid, version = held.get("uid"), held.get("resourceVersion")
    gone = store.delete(*where, grace=grace, uid=uid, version=version)
    return gone if target.resource == "pods" else _success()


def _check_marks(target: Target, metadata: Json) -> None:
    """Check that labels and annotations are strings and not too long."""
    marks = metadata.get("annotations") or {}
    texts = (*marks.values(), *(metadata.get("labels") or {}).values())
    if not all(isinstance(text, str) for text in texts):
        raise _invalid(target, "metadata: annotations and labels are strings")
    if sum(len(key.encode()) + len(text.encode()) for key, text in marks.items()) > _TOO_LONG:
        detail = f"metadata.annotations: Too long: may not be more than {_TOO_LONG} bytes"
        raise _invalid(target, detail)


def _invalid(target: Target, detail: str) -> InvalidError:
    return InvalidError(f'{KINDS[target.resource]} "{target.name}" is invalid: {detail}')


def _success() -> Json:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
