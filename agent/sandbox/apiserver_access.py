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
