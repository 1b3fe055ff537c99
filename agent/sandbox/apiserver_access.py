"""Authentication by bearer tokens, and the permissions of nodes and service accounts.

The rules for nodes are those of the Node authorizer and the NodeRestriction admission plugin of
kube-apiserver 1.36 (pkg/auth/authorizer/node, plugin/pkg/admission/noderestriction), as observed.
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

_MIRROR: Final = "kubernetes.io/config.mirror"
_RESTRICTED: Final = "node-restriction.kubernetes.io/"
_OWN_POD_RULES: Final[Mapping[tuple[str, str], str]] = {
    ("patch", "pods/status"): "can only update pod status for",
    ("update", "pods/status"): "can only update pod status for",
    ("delete", "pods"): "can only delete",
}


class NotAdmittedError(ForbiddenError):
    """NodeRestriction refuses an authorized request. Access reviews do not show this."""


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
    def subject(self) -> str:
        """The name of the object, from the path or from the selector."""
        return self.name or self.fields.get("metadata.name", "")

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


Rights = Mapping[str, frozenset[tuple[str, str]]]
"""Verbs and resources of further users, as ClusterRoles grant them."""


def authorize(user: str, target: Target, stored: Json | None, rights: Rights | None = None) -> None:
    """Check the user's permission for the request. `stored` is the object it names, if it exists.

    Raises:
        ForbiddenError: the user does not have the permission.
    """
    if user == ADMIN:
        return
    if user.startswith(NODE_PREFIX):
        _authorize_node(user, user.removeprefix(NODE_PREFIX), target, stored)
        return
    account = _ACCOUNT_RIGHTS if user.startswith(ACCOUNT_PREFIX) else frozenset()
    granted = (rights or {}).get(user, account)
    if (target.verb, target.full_resource) not in granted:
        raise _forbidden(user, target)


def restrict(user: str, target: Target, before: Json | None, after: Json) -> None:
    """Check an authorized write by the rules of NodeRestriction. Only nodes are restricted.

    Raises:
        ForbiddenError: NodeRestriction refuses it.
    """
    if not user.startswith(NODE_PREFIX):
        return
    node, name = user.removeprefix(NODE_PREFIX), after["metadata"].get("name", "")
    refusal = ""
    if before is None:
        refusal = _new_object_refusal(node, target, after, name)
    elif target.full_resource == "pods/status":
        if _marks(before, "labels") != _marks(after, "labels"):
            refusal = f'node "{node}" cannot update labels through pod status'
    elif target.resource == "nodes":
        refusal = _own_node_refusal(node, before, after)
    if refusal:
        raise ForbiddenError(f'{target.resource} "{name}" is forbidden: {refusal}')


def _new_object_refusal(node: str, target: Target, after: Json, name: str) -> str:
    if target.full_resource == "pods":
        if _MIRROR not in _marks(after, "annotations"):
            missing = f'pod does not have "{_MIRROR}" annotation'
            return f'{missing}, node "{node}" can only create mirror pods'
        return f'node "{node}" can only create pods with an owner reference set to itself'
    if target.resource == "nodes" and name != node:
        return f'node "{node}" is not allowed to modify node "{name}"'
    return ""


def _own_node_refusal(node: str, before: Json, after: Json) -> str:
    if (before.get("spec") or {}).get("taints") != (after.get("spec") or {}).get("taints"):
        return f'node "{node}" is not allowed to modify taints'
    old, new = _marks(before, "labels"), _marks(after, "labels")
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    refused = sorted(key for key in changed if key.startswith(_RESTRICTED))
    return f"is not allowed to modify labels: {', '.join(refused)}" if refused else ""


def _marks(obj: Json, kind: str) -> Mapping[str, str]:
    marks: Mapping[str, str] = obj["metadata"].get(kind) or {}
    return marks


def _authorize_node(user: str, node: str, target: Target, stored: Json | None) -> None:
    if target.resource == "nodes":
        _authorize_own_node(user, node, target)
    elif target.resource == "pods":
        _authorize_own_pods(user, node, target, stored)
    elif (target.verb, target.full_resource) not in (("create", "events"), ("patch", "events")):
        raise _forbidden(user, target)


def _authorize_own_node(user: str, node: str, target: Target) -> None:
    named = target.subject
    if target.verb in ("get", "list", "watch"):
        if named != node:
            whom = f"'{named}'" if named else "all nodes"
            detail = f"node '{node}' cannot read {whom}, only its own Node object"
            raise _forbidden(user, target, detail)
    elif target.verb == "create":
        return  # see `restrict`
    elif target.verb not in ("patch", "update"):
        raise _forbidden(user, target)
    elif named != node:
        raise _refused(target, f'node "{node}" is not allowed to modify node "{named}"')


def _authorize_own_pods(user: str, node: str, target: Target, stored: Json | None) -> None:
    if target.verb in ("list", "watch"):
        if target.fields.get("spec.nodeName") != node:
            detail = "can only list/watch pods with spec.nodeName field selector"
            raise _forbidden(user, target, detail)
        return
    call, is_own = (target.verb, target.full_resource), _is_on(stored, node)
    if call == ("get", "pods") and not is_own:
        detail = f"no relationship found between node '{node}' and this object"
        raise _forbidden(user, target, detail)
    if call in (("get", "pods"), ("create", "pods")):
        return  # see `restrict`
    if call not in _OWN_POD_RULES:
        raise _forbidden(user, target)
    if stored is None or is_own:
        return
    rule = _OWN_POD_RULES[call]
    raise _refused(target, f'node "{node}" {rule} pods with spec.nodeName set to itself')


def _is_on(stored: Json | None, node: str) -> bool:
    return stored is not None and stored["spec"].get("nodeName") == node


def _forbidden(user: str, target: Target, detail: str = "") -> ForbiddenError:
    scope = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
    denied = f'User "{user}" cannot {target.verb} resource "{target.full_resource}"'
    ending = f": {detail}" if detail else ""
    return ForbiddenError(_about(target, f'{denied} in API group "" {scope}{ending}'))


def _refused(target: Target, text: str) -> NotAdmittedError:
    return NotAdmittedError(_about(target, text))


def _about(target: Target, text: str) -> str:
    subject = f'{target.resource} "{target.subject}"' if target.subject else target.resource
    return f"{subject} is forbidden: {text}"
