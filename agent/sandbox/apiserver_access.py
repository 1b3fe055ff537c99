"""Authentication by bearer tokens, and the permissions of nodes and service accounts.

The rules for nodes are those of the Node authorizer and the NodeRestriction admission plugin of
kube-apiserver 1.36 (pkg/auth/authorizer/node, plugin/pkg/admission/noderestriction), as observed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.sandbox.api_errors import BadRequestError, ForbiddenError, Json, UnauthorizedError

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
    granted, why = (rights or {}).get(user, frozenset()), ""
    if user.startswith(NODE_PREFIX):
        granted, why = _NODE_RIGHTS, _not_its_own(user.removeprefix(NODE_PREFIX), target, stored)
    elif user.startswith(ACCOUNT_PREFIX):
        granted = _ACCOUNT_RIGHTS
    if why or (target.verb, target.full_resource) not in granted:
        scope = f'namespace "{target.namespace}"' if target.namespace else "cluster scope"
        denied = f'User "{user}" cannot {target.verb} resource "{target.full_resource}"'
        text = f'{denied} in API group "" in the {scope}{f": {why}" if why else ""}'
        raise ForbiddenError(_about(target, text))


def _not_its_own(node: str, target: Target, stored: Json | None) -> str:
    """Why the Node authorizer keeps a node from reading an object; empty if it does not."""
    is_list = target.verb in ("list", "watch")
    named = target.name or target.fields.get("metadata.name")
    if target.resource == "nodes" and (is_list or target.verb == "get") and named != node:
        return f"node '{node}' can only read its own Node object"
    if target.resource == "pods" and is_list and target.fields.get("spec.nodeName") != node:
        return "can only list/watch pods with spec.nodeName field selector"
    is_unrelated = stored is None or (stored.get("spec") or {}).get("nodeName") != node
    if target.resource == "pods" and target.verb == "get" and is_unrelated:
        return f"no relationship found between node '{node}' and this object"
    return ""


def restrict(user: str, target: Target, before: Json | None, after: Json | None) -> None:
    """Check an authorized write by the rules of NodeRestriction. Only nodes are restricted.

    `before` is None for a new object, `after` for a deletion. An access review does not show it.

    Raises:
        ForbiddenError: NodeRestriction refuses it.
    """
    if user.startswith(NODE_PREFIX):
        node = user.removeprefix(NODE_PREFIX)
        check = {"nodes": _node_refusal, "pods": _pod_refusal}.get(target.resource)
        if check is not None and (refusal := check(node, before, after)):
            raise ForbiddenError(_about(target, refusal))


def _node_refusal(node: str, before: Json | None, after: Json | None) -> str:
    name = (before or after or {})["metadata"].get("name", "")
    if name != node:
        return f'node "{node}" is not allowed to modify node "{name}"'
    if before is None or after is None:
        return ""
    if (before.get("spec") or {}).get("taints") != (after.get("spec") or {}).get("taints"):
        return f'node "{node}" is not allowed to modify taints'
    old, new = _labels(before), _labels(after)
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    refused = sorted(key for key in changed if key.startswith(_RESTRICTED))
    return f"is not allowed to modify labels: {', '.join(refused)}" if refused else ""


def _pod_refusal(node: str, before: Json | None, after: Json | None) -> str:
    if before is None:
        return f'node "{node}" can only create mirror pods'
    if before["spec"].get("nodeName") != node:
        return f'node "{node}" can only write pods with spec.nodeName set to itself'
    if after is not None and _labels(before) != _labels(after):
        return f'node "{node}" cannot update labels through pod status'
    return ""


def _labels(obj: Json) -> Mapping[str, str]:
    labels: Mapping[str, str] = obj["metadata"].get("labels") or {}
    return labels


def _about(target: Target, text: str) -> str:
    subject = f'{target.resource} "{target.name}"' if target.name else target.resource
    return f"{subject} is forbidden: {text}"


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
