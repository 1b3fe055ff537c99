"""One request to the API server: what it names, who may make it, what it reads and writes.

There are no schemas. The store keeps objects as given, and only the rules that a client of this
project can meet are checked.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

from agent.cluster import parse_selector
from agent.errors import MalformedText
from agent.sandbox.store import (
    CLUSTER_SCOPED,
    KINDS,
    BadRequestError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    Json,
    NotFoundError,
    ObjectStore,
    UnauthorizedError,
)

# The three kinds of patch of the API server, as pure functions on JSON values.

MERGE_KEYS: Final[Mapping[str, str]] = {
    "addresses": "type",
    "conditions": "type",
    "containers": "name",
    "env": "name",
    "initContainers": "name",
    "ownerReferences": "uid",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Lists that a strategic merge patch merges by element, and the key they merge by."""


def merge_patch(target: Json, patch: Json) -> Json:
    """Apply a JSON merge patch (RFC 7396): merges maps, null deletes, other values replace."""
    merged = dict(target)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            held = merged.get(key)
            merged[key] = merge_patch(held if isinstance(held, dict) else {}, value)
        else:
            merged[key] = deepcopy(value)
    return merged


def strategic_merge_patch(target: Json, patch: Json) -> Json:
    """Apply a strategic merge patch, which also merges some lists by element.

    It supports `$patch: delete` of elements. It ignores `$setElementOrder/…`, which only orders a
    list.

    Raises:
        BadRequestError: another directive, or an element without its merge key.
    """
    merged = dict(target)
    for key, value in patch.items():
        if key.startswith("$"):
            if not key.startswith("$setElementOrder/"):
                raise BadRequestError(f"patch directive not supported: {key}")
        elif value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            held = merged.get(key)
            merged[key] = strategic_merge_patch(held if isinstance(held, dict) else {}, value)
        elif isinstance(value, list) and key in MERGE_KEYS:
            merged[key] = _merge_list(MERGE_KEYS[key], merged.get(key) or [], value)
        else:
            merged[key] = deepcopy(value)
    return merged


def _merge_list(by: str, held: Sequence[Json], patch: Sequence[Json]) -> list[Json]:
    merged = {entry.get(by): entry for entry in held}
    for entry in patch:
        if by not in entry:
            raise BadRequestError(f"an element does not contain the merge key {by}")
        if entry.get("$patch") == "delete":
            merged.pop(entry[by], None)
        else:
            merged[entry[by]] = strategic_merge_patch(merged.get(entry[by], {}), entry)
    return list(merged.values())


def json_patch(target: Json, operations: Sequence[Any]) -> Json:
    """Apply a JSON patch (RFC 6902) of members of maps, all of it or nothing.

    Raises:
        InvalidError: a test fails, a path does not exist, or this model has no such operation.
    """
    result = deepcopy(target)
    for operation in operations:
        match operation:
            case {"op": "add" | "replace" | "remove" | "test" as name, "path": str(path)}:
                value = operation.get("value")
            case _:
                raise InvalidError(f"unexpected JSON patch operation: {operation}"[:256])
        *parts, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")]
        holder: Any = result
        for part in parts[1:]:
            if isinstance(holder, list) and part.isdecimal() and int(part) < len(holder):
                holder = holder[int(part)]
            else:
                holder = holder.get(part) if isinstance(holder, dict) else None
        if not isinstance(holder, dict) or (last not in holder and name != "add"):
            raise InvalidError(f"{name} operation does not apply: doc is missing path: {path}")
        if name == "test":
            if holder[last] != value:
                raise InvalidError(f"testing value {path} failed")
        elif name == "remove":
            del holder[last]
        else:
            holder[last] = deepcopy(value)
    return result


# Authentication by bearer tokens, and the permissions of nodes and service accounts.
#
# The rules for nodes are those of the Node authorizer and the NodeRestriction admission plugin of
# kube-apiserver 1.36 (pkg/auth/authorizer/node, plugin/pkg/admission/noderestriction), as observed.

ADMIN: Final = "admin"
NODE_PREFIX: Final = "system:node:"
ACCOUNT_PREFIX: Final = "system:serviceaccount:"
_ACCOUNT_RIGHTS: Final = frozenset(
    {
        ("get", "nodes"),
        ("watch", "nodes"),
        ("patch", "nodes"),
        ("get", "pods"),
        ("list", "pods"),
        ("watch", "pods"),
        ("patch", "pods/status"),
        ("create", "events"),
        ("patch", "events"),
    }
)
"""The permissions of the agent's ClusterRole (deploy/manifests/rbac.yaml)."""
_NODE_RIGHTS: Final = _ACCOUNT_RIGHTS | {
    ("list", "nodes"),
    ("create", "nodes"),
    ("patch", "nodes/status"),
    ("create", "pods"),
    ("delete", "pods"),
}
"""What the Node authorizer grants, before it looks at whose object it is."""
_RESTRICTED: Final = "node-restriction.kubernetes.io/"

Rights = Mapping[str, frozenset[tuple[str, str]]]
"""Verbs and resources of further users, as ClusterRoles grant them."""


@dataclass(frozen=True, slots=True)
class Target:
    """The verb and the object of a request, from its path, method and query."""

    verb: str
    resource: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    """The query as received."""

    @property
    def full_resource(self) -> str:
        """The resource with its subresource, as RBAC rules spell it."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource


def identify(tokens: Mapping[str, str], authorization: str | None) -> str:
    """The user behind an Authorization header.

    Raises:
        UnauthorizedError: no bearer token, or an unknown one.
    """
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or token not in tokens:
        raise UnauthorizedError("Unauthorized")
    return tokens[token]


def authorize(user: str, target: Target, stored: Json | None, rights: Rights | None = None) -> None:
    """Check the user's permission for the request. `stored` is the object it names, if it exists.

    Raises:
        ForbiddenError: the user does not have the permission.
    """
    if user == ADMIN:
        return
    granted, is_its_own = (rights or {}).get(user, frozenset()), True
    if user.startswith(NODE_PREFIX):
        granted = _NODE_RIGHTS
        is_its_own = _reads_its_own(user.removeprefix(NODE_PREFIX), target, stored)
    elif user.startswith(ACCOUNT_PREFIX):
        granted = _ACCOUNT_RIGHTS
    if not is_its_own or (target.verb, target.full_resource) not in granted:
        denied = f'User "{user}" cannot {target.verb} resource "{target.full_resource}"'
        raise _forbidden(target, denied)


def _reads_its_own(node: str, target: Target, stored: Json | None) -> bool:
    """Whether the Node authorizer lets a node read what is asked for. It looks at nothing else."""
    is_list = target.verb in ("list", "watch")
    if target.resource == "nodes" and (is_list or target.verb == "get"):
        return (target.name or target.fields.get("metadata.name")) == node
    if target.resource == "pods" and is_list:
        return target.fields.get("spec.nodeName") == node
    if target.resource == "pods" and target.verb == "get":
        return stored is not None and (stored.get("spec") or {}).get("nodeName") == node
    return True


def restrict(user: str, target: Target, before: Json | None, after: Json | None) -> None:
    """Check an authorized write by the rules of NodeRestriction. Only nodes are restricted.

    `before` is None for a new object, `after` for a deletion. An access review does not show it.

    Raises:
        ForbiddenError: NodeRestriction refuses it.
    """
    if not user.startswith(NODE_PREFIX):
        return
    node, is_changed = user.removeprefix(NODE_PREFIX), before is not None and after is not None
    old, new = before or after or {}, after or before or {}
    labels, now = (one["metadata"].get("labels") or {} for one in (old, new))
    changed = {key for key in labels.keys() | now.keys() if labels.get(key) != now.get(key)}
    is_allowed = True
    if target.resource == "nodes":
        taints = [(one.get("spec") or {}).get("taints") for one in (old, new)]
        is_restricted = any(key.startswith(_RESTRICTED) for key in changed)
        is_allowed = old["metadata"].get("name", "") == node
        is_allowed &= not is_changed or (taints[0] == taints[1] and not is_restricted)
    elif target.resource == "pods":  # it may create mirror pods alone, which are not modelled
        is_allowed = before is not None and before["spec"].get("nodeName") == node and not changed
    if not is_allowed:
        kind = target.resource.removesuffix("s")
        refused = f'node "{node}" is not allowed to modify {kind} "{target.name}"'
        raise _forbidden(target, refused)


def _forbidden(target: Target, text: str) -> ForbiddenError:
    subject = f'{target.resource} "{target.name}"' if target.name else target.resource
    return ForbiddenError(f"{subject} is forbidden: {text}")


def reviewed(
    user: str,
    review: Json,
    parse_fields: Callable[[str], Mapping[str, str]],
    find: Callable[[Target], Json | None],
) -> Json:
    """Answer a SelfSubjectAccessReview. `find` returns the object that it names, if it exists.

    Raises:
        BadRequestError: it is not a review of a resource.
    """
    asked = (review.get("spec") or {}).get("resourceAttributes")
    if not isinstance(asked, dict):
        raise BadRequestError("only spec.resourceAttributes is reviewed here")
    keys = ("verb", "resource", "namespace", "name", "subresource")
    selector = (asked.get("fieldSelector") or {}).get("rawSelector", "")
    verb, resource, namespace, name, part = (asked.get(key, "") for key in keys)
    target = Target(verb, resource, namespace, name, part, parse_fields(selector))
    try:
        authorize(user, target, find(target))
    except ForbiddenError:
        return review | {"status": {"allowed": False}}
    return review | {"status": {"allowed": True}}


# The object and the options of a request.

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
        selector = parse_selector(text) if text else ()
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
        if all(one.holds(item["metadata"].get("labels") or {}) for one in selector)
        and _place(item) > start
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
        if metadata.get("name") != name:
            raise BadRequestError("name in URL does not match name in Binding object")
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
