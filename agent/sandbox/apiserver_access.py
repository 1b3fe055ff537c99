"""Who may do what: bearer tokens, the rules for a node's own identity, and for a DaemonSet's.

The node's rules are those of the Node authorizer and the NodeRestriction admission plugin of
kube-apiserver 1.36 (pkg/auth/authorizer/node, plugin/pkg/admission/noderestriction), as tried.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.sandbox.api_errors import ForbiddenError, Json, UnauthorizedError

ADMIN: Final = "admin"
NODE_PREFIX: Final = "system:node:"
ACCOUNT_PREFIX: Final = "system:serviceaccount:"
_ACCOUNT_RIGHTS: Final = frozenset(
    {
        ("get", "nodes"),
        ("list", "nodes"),
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
"""What the agent's ClusterRole grants."""

_OWN_POD_RULES: Final[Mapping[tuple[str, str], str]] = {
    ("patch", "pods/status"): "can only update pod status for",
    ("delete", "pods"): "can only delete",
}


@dataclass(frozen=True, slots=True)
class Target:
    """What a request is about, after its path, its method and its query."""

    verb: str
    resource: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def full_resource(self) -> str:
        """The resource with its subresource, as RBAC rules spell it."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource


def identify(tokens: Mapping[str, str], authorization: str | None) -> str:
    """The user behind an Authorization header.

    Raises:
        UnauthorizedError: no bearer token, or one that nobody knows.
    """
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or token not in tokens:
        raise UnauthorizedError("Unauthorized")
    return tokens[token]


def authorize(user: str, target: Target, stored: Json | None) -> None:
    """Let the request pass; `stored` is the object it names, when there is one.

    Raises:
        ForbiddenError: the user has no right to it.
    """
    if user == ADMIN:
        return
    if user.startswith(NODE_PREFIX):
        _authorize_node(user, user.removeprefix(NODE_PREFIX), target, stored)
        return
    granted = (target.verb, target.full_resource) in _ACCOUNT_RIGHTS
    if not (user.startswith(ACCOUNT_PREFIX) and granted):
        raise _forbidden(user, target)


def _authorize_node(user: str, node: str, target: Target, stored: Json | None) -> None:
    if target.resource == "nodes":
        _authorize_own_node(user, node, target)
    elif target.resource == "pods":
        _authorize_own_pods(user, node, target, stored)
    elif (target.verb, target.full_resource) not in (("create", "events"), ("patch", "events")):
        raise _forbidden(user, target)


def _authorize_own_node(user: str, node: str, target: Target) -> None:
    named = target.name or target.fields.get("metadata.name", "")
    if target.verb in ("get", "list", "watch"):
        if named != node:
            detail = f"node '{node}' cannot read '{named}', only its own Node object"
            raise _forbidden(user, target, detail)
    elif target.verb != "patch":
        raise _forbidden(user, target)
    elif named != node:
        raise _refused(target, f'node "{node}" is not allowed to modify node "{named}"')


def _authorize_own_pods(user: str, node: str, target: Target, stored: Json | None) -> None:
    if target.verb in ("list", "watch"):
        if target.fields.get("spec.nodeName") != node:
            detail = "can only list/watch pods with spec.nodeName field selector"
            raise _forbidden(user, target, detail)
        return
    call = (target.verb, target.full_resource)
    if call != ("get", "pods") and call not in _OWN_POD_RULES:
        raise _forbidden(user, target)
    if stored is None or stored["spec"].get("nodeName") == node:
        return
    if call == ("get", "pods"):
        detail = f"no relationship found between node '{node}' and this object"
        raise _forbidden(user, target, detail)
    rule = _OWN_POD_RULES[call]
    raise _refused(target, f'node "{node}" {rule} pods with spec.nodeName set to itself')


def _forbidden(user: str, target: Target, detail: str = "") -> ForbiddenError:
    scope = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
    denied = f'User "{user}" cannot {target.verb} resource "{target.full_resource}"'
    ending = f": {detail}" if detail else ""
    return _refused(target, f'{denied} in API group "" {scope}{ending}')


def _refused(target: Target, text: str) -> ForbiddenError:
    subject = f'{target.resource} "{target.name}"' if target.name else target.resource
    return ForbiddenError(f"{subject} is forbidden: {text}")
