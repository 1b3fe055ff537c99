"""Parses the path, the method and the query of a request into a Target."""

from collections.abc import Mapping, Sequence
from typing import Final

from agent.sandbox.api_errors import BadRequestError, MethodNotAllowedError, NotFoundError
from agent.sandbox.apiserver_access import Target
from agent.sandbox.store import CLUSTER_SCOPED, KINDS

_METHODS: Final[Mapping[str, str]] = {
    "POST": "create",
    "PUT": "update",
    "PATCH": "patch",
    "DELETE": "delete",
}
_ITEM: Final = frozenset({"get", "update", "patch", "delete"})
_COLLECTION: Final = frozenset({"list", "watch", "create"})
_SUBRESOURCES: Final[Mapping[str, frozenset[str]]] = {
    "nodes/status": frozenset({"get", "update", "patch"}),
    "pods/status": frozenset({"get", "update", "patch"}),
    "pods/binding": frozenset({"create"}),
}


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
    resource, name, subresource = _split(parts)
    fields = parse_fields(query)
    verb = _verb(method, name, query)
    return Target(verb, resource, namespace, name, subresource, fields, dict(query))


def require_served(target: Target) -> None:
    """Check that this server serves the target. Call it after the check of permissions.

    Raises:
        NotFoundError: no such path.
        MethodNotAllowedError: the path does not have the method.
    """
    if target.resource not in KINDS:
        raise _no_path()
    is_global = target.resource in CLUSTER_SCOPED
    if (target.namespace and is_global) or (target.name and not target.namespace and not is_global):
        raise _no_path()
    if target.subresource and target.full_resource not in _SUBRESOURCES:
        raise _no_path()
    served = _ITEM if target.name else _COLLECTION
    if target.subresource:
        served = _SUBRESOURCES[target.full_resource]
    is_nowhere = target.verb == "create" and not is_global and not target.namespace
    if target.verb not in served or is_nowhere:
        raise MethodNotAllowedError(
            "the server does not allow this method on the requested resource"
        )


def parse_fields(query: Mapping[str, str]) -> dict[str, str]:
    """Parse the field selector: value by label. A term `label!=value` is a key of its own.

    Raises:
        BadRequestError: a label selector of a watch, or a term without `=`.
    """
    if query.get("labelSelector") and is_set(query, "watch"):
        raise BadRequestError("labelSelector of a watch is not evaluated by this server")
    fields = {}
    selector = query.get("fieldSelector", "")
    for term in filter(None, selector.split(",")):
        label, equals, value = term.partition("=")
        if not equals:
            text = f"invalid selector: '{selector}'; can't understand '{term}'"
            raise BadRequestError(text[:256])
        if label.endswith("!"):
            fields[term] = ""
        else:
            fields[label] = value.removeprefix("=")
    return fields


def number(query: Mapping[str, str], name: str) -> int:
    """Parse an option that is a 64-bit number; 0 if it is absent.

    Raises:
        BadRequestError: it is not a number.
    """
    text = query.get(name, "")
    digits = text.removeprefix("-")
    if text and not (digits.isascii() and digits.isdecimal()):
        raise BadRequestError(f'strconv.ParseInt: parsing "{text[:64]}": invalid syntax')
    return int(text or "0")


def is_set(query: Mapping[str, str], name: str) -> bool:
    """Whether an option is present and neither `0` nor `false`. Any other value is true."""
    return name in query and query[name].lower() not in ("0", "false")


def _split(parts: Sequence[str]) -> tuple[str, str, str]:
    if not 1 <= len(parts) <= 3 or not parts[0]:
        raise _no_path()
    resource, name, subresource = [*parts, "", ""][:3]
    return resource, name, subresource


def _verb(method: str, name: str, query: Mapping[str, str]) -> str:
    if method != "GET":
        return _METHODS.get(method, method.lower())
    if name:
        return "get"
    return "watch" if is_set(query, "watch") else "list"


def _no_path() -> NotFoundError:
    return NotFoundError("the server could not find the requested resource")
