"""One request to the API server: what it names, who may make it, what it reads and writes."""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from agent.cluster import parse_selector
from agent.sandbox.store import (
    KINDS,
    BadRequestError,
    ForbiddenError,
    InvalidError,
    Json,
    NotFoundError,
    ObjectStore,
    UnauthorizedError,
    status_of,
)

# The three kinds of patch of the API server, as pure functions on JSON values.

MERGE_KEYS: Final[Mapping[str, str]] = {"conditions": "type"}
"""The list that a strategic merge patch merges by element, and the key it merges by."""


def merge_patch(target: Json, patch: Json, keys: Mapping[str, str] | None = None) -> Json:
    """Apply a JSON merge patch (RFC 7396): merges maps, null deletes, other values replace.

    With `keys` it is a strategic merge patch, which merges the lists in `keys` by element and
    deletes an element with `$patch: delete`.
    """
    merged = dict(target)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            held = merged.get(key)
            merged[key] = merge_patch(held if isinstance(held, dict) else {}, value, keys)
        elif keys and key in keys:
            by = keys[key]
            entries = {entry.get(by): entry for entry in merged.get(key) or ()}
            for entry in value:
                if entry.get("$patch") == "delete":
                    entries.pop(entry[by], None)
                else:
                    entries[entry[by]] = merge_patch(entries.get(entry[by], {}), entry, keys)
            merged[key] = list(entries.values())
        else:
            merged[key] = deepcopy(value)
    return merged


def json_patch(target: Json, operations: Sequence[Any]) -> Json:
    """Apply a JSON patch (RFC 6902) that tests and removes members of maps: all of it or nothing.

    Raises InvalidError: a test fails, a path does not exist, or this model has no such operation.
    """
    result = deepcopy(target)
    for operation in operations:
        path: str = operation["path"]
        *parts, last = [p.replace("~1", "/").replace("~0", "~") for p in path.split("/")]
        holder: Any = result
        for part in parts[1:]:
            holder = holder.get(part) or {}
        match operation:
            case {"op": "test", "value": value} if holder.get(last) == value:
                pass
            case {"op": "remove"} if last in holder:
                del holder[last]
            case _:
                raise InvalidError(f"the operation does not apply: {operation}"[:256])
    return result


# Who may do what, by bearer tokens: the agent's ClusterRole, and the Node authorizer.

ADMIN: Final = "admin"
NODE_PREFIX: Final = "system:node:"
ACCOUNT_PREFIX: Final = "system:serviceaccount:"
_ACCOUNT_RIGHTS: Final = frozenset(
    {
        *((verb, "nodes") for verb in ("get", "watch", "patch")),
        *((verb, "pods") for verb in ("get", "list", "watch")),
        ("patch", "pods/status"),
        *((verb, "events") for verb in ("create", "patch")),
    }
)
"""The permissions of the agent's ClusterRole (deploy/manifests/rbac.yaml)."""
_NODE_RIGHTS: Final = _ACCOUNT_RIGHTS | {("list", "nodes"), ("patch", "nodes/status")}
"""What the Node authorizer grants, before it looks at whose object it is."""

Rights = Mapping[str, frozenset[tuple[str, str]]]
"""Verbs and resources of further users, as ClusterRoles grant them."""


@dataclass(frozen=True, slots=True)
class Target:
    """The verb and the object of a request, from its path, method and query (`options`)."""

    verb: str
    resource: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def full_resource(self) -> str:
        """The resource with its subresource, as RBAC rules spell it."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource


def identify(tokens: Mapping[str, str], authorization: str) -> str:
    """The user behind an Authorization header. Raises UnauthorizedError."""
    try:
        return tokens[authorization.removeprefix("Bearer ")]
    except KeyError:
        raise UnauthorizedError("Unauthorized") from None


def authorize(user: str, target: Target, store: ObjectStore, rights: Rights) -> None:
    """Check the user's permission for the request. Raises ForbiddenError."""
    if user == ADMIN:
        return
    granted, is_its_own = rights.get(user, frozenset()), True
    if user.startswith(NODE_PREFIX):
        granted = _NODE_RIGHTS
        is_its_own = _reads_its_own(user.removeprefix(NODE_PREFIX), target, store)
    elif user.startswith(ACCOUNT_PREFIX):
        granted = _ACCOUNT_RIGHTS
    if not is_its_own or (target.verb, target.full_resource) not in granted:
        subject = f'{target.resource} "{target.name}"' if target.name else target.resource
        denied = f'User "{user}" cannot {target.verb} resource "{target.full_resource}"'
        raise ForbiddenError(f"{subject} is forbidden: {denied}")


def _reads_its_own(node: str, target: Target, store: ObjectStore) -> bool:
    """Whether the Node authorizer lets a node read what is asked for. It looks at nothing else."""
    match target.resource, target.verb:
        case "nodes", "get" | "list" | "watch":
            return (target.name or target.fields.get("metadata.name")) == node
        case "pods", "list" | "watch":
            return target.fields.get("spec.nodeName") == node
        case "pods", "get":
            with contextlib.suppress(NotFoundError):
                pod = store.get("pods", target.namespace, target.name)
                return bool(pod["spec"].get("nodeName") == node)
            return False
        case _:
            return True


def parse_review(review: Json) -> Target:
    """What a SelfSubjectAccessReview of a resource asks about."""
    asked = review["spec"]["resourceAttributes"]
    selector = (asked.get("fieldSelector") or {}).get("rawSelector", "")
    keys = ("verb", "resource", "namespace", "name", "subresource")
    return Target(**{key: asked.get(key, "") for key in keys}, fields=parse_fields(selector))


# The object and the options of a request.

NO_PATH: Final = "the server could not find the requested resource"
JSON_PATCH: Final = "application/json-patch+json"
_MERGES: Final[Mapping[str, Mapping[str, str]]] = {
    "application/merge-patch+json": {},
    "application/strategic-merge-patch+json": MERGE_KEYS,
}
_VERBS: Final = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
_PATH: Final = re.compile(
    r"/api/v1(?:/namespaces/([^/]+)(?=/.))?/([^/]+)(?:/([^/]+))?(?:/(status|binding))?"
)


def parse_target(method: str, path: str, query: Mapping[str, str]) -> Target:
    """Parse a request below `/api/v1`, whether its resource is served or not.

    Raises NotFoundError: no such path; BadRequestError: a malformed selector.
    """
    found = _PATH.fullmatch(path)
    if found is None:
        raise NotFoundError(NO_PATH)
    namespace, resource, name, subresource = found.groups("")
    verb, fields = _VERBS.get(method, method.lower()), parse_fields(query.get("fieldSelector", ""))
    if method == "GET" and not name:
        verb = "watch" if is_set(query, "watch") else "list"
        fields |= {"metadata.namespace": namespace} if namespace else {}
    return Target(verb, resource, namespace, name, subresource, fields, dict(query))


def parse_fields(selector: str) -> dict[str, str]:
    """Parse a field selector: value by label. A term `label!=value` is a key of its own.

    Raises BadRequestError: a term without `=`.
    """
    fields = {}
    for term in filter(None, selector.split(",")):
        label, equals, value = term.partition("=")
        if not equals:
            raise BadRequestError(f"invalid selector: '{selector}'; can't understand '{term}'")
        fields[term if label.endswith("!") else label] = value.removeprefix("=")
    return fields


def is_set(query: Mapping[str, str], name: str) -> bool:
    """Whether an option is present and true."""
    return query.get(name) in ("1", "true")


T = TypeVar("T")


# Reads and writes. Each raises StatusError as the real server would refuse it.


def list_objects(store: ObjectStore, target: Target) -> Json:
    """The list that a request asks for, whole whatever its limit."""
    text = target.options.get("labelSelector", "")
    selector = parse_selector(text) if text else ()
    items = [
        item
        for item in store.select(target.resource, fields=target.fields)
        if all(one.holds(item["metadata"].get("labels") or {}) for one in selector)
    ]
    metadata, kind = {"resourceVersion": str(store.version)}, KINDS[target.resource] + "List"
    return {"kind": kind, "apiVersion": "v1", "metadata": metadata, "items": items}


def parse_body(body: bytes, form: type[T]) -> T:
    """Parse a body of that form. Raises BadRequestError."""
    try:
        return msgspec.json.decode(body, type=form)
    except msgspec.MsgspecError as error:
        raise BadRequestError(f"the body: {error}") from error


def create(
    store: ObjectStore, target: Target, body: bytes, admit: Callable[[Json], Json] | None = None
) -> Json:
    """Create an object, or bind a pod if the target is `pods/binding`. `admit` gets new pods."""
    given = parse_body(body, dict)
    metadata = given.setdefault("metadata", {})
    if target.subresource == "binding":
        store.bind(target.namespace, target.name, given["target"]["name"], uid=metadata.get("uid"))
        return status_of("Success")
    if target.namespace:
        metadata["namespace"] = target.namespace
    if target.resource == "pods":
        given = given if admit is None else admit(given)
        given.pop("status", None)
    return store.create(target.resource, given)


def patch(store: ObjectStore, target: Target, content_type: str, body: bytes) -> Json:
    """Apply one PATCH with the preconditions `metadata.resourceVersion` and `metadata.uid`.

    A status patch keeps the spec, a plain patch keeps the status, and both store metadata
    (kube-apiserver: pkg/registry/core/pod/strategy.go, .../node/strategy.go).
    """
    changes = parse_body(body, object)

    def change(stored: Json) -> Json:
        if content_type == JSON_PATCH and isinstance(changes, list):
            fresh = json_patch(stored, changes)
        elif content_type in _MERGES and isinstance(changes, dict):
            fresh = merge_patch(stored, changes, _MERGES[content_type])
        else:
            raise BadRequestError(f"{content_type[:64]} and this body are no patch")
        kept = "spec" if target.subresource else "status"
        fresh = {key: value for key, value in fresh.items() if key != kept}
        return fresh | ({kept: stored[kept]} if kept in stored else {})

    return store.update(target.resource, target.namespace, target.name, change)


def delete(store: ObjectStore, target: Target, body: bytes) -> Json:
    """Delete an object, with the grace period of the body's DeleteOptions."""
    grace = (parse_body(body, dict) if body else {}).get("gracePeriodSeconds")
    gone = store.delete(target.resource, target.namespace, target.name, grace=grace)
    return gone if target.resource == "pods" else status_of("Success")
