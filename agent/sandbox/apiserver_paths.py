"""From the path, the method and the query of a request to what it is about."""

from collections.abc import Mapping, Sequence
from typing import Final

from agent.sandbox.api_errors import BadRequestError, MethodNotAllowedError, NotFoundError
from agent.sandbox.apiserver_access import Target
from agent.sandbox.store import CLUSTER_SCOPED, KINDS

_SUBRESOURCES: Final = frozenset({"nodes/status", "pods/status", "pods/binding"})
_VERBS: Final[Mapping[str, str]] = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}


def parse_target(method: str, path: str, query: Mapping[str, str]) -> Target:
    """Name the verb and the object of a request below `/api/v1`.

    Raises:
        NotFoundError: no such path.
        MethodNotAllowedError: a method that the path does not have.
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
    if namespace and resource in CLUSTER_SCOPED:
        raise _no_path()
    if name and not namespace and resource not in CLUSTER_SCOPED:
        raise _no_path()
    fields = parse_fields(query)
    verb = _verb(method, name, query)
    return Target(verb, resource, namespace, name, subresource, fields)


def parse_fields(query: Mapping[str, str]) -> dict[str, str]:
    """The field selector of a query; only equality is evaluated.

    Raises:
        BadRequestError: a label selector, an inequality, or a term without `=`.
    """
    if query.get("labelSelector"):
        raise BadRequestError("labelSelector is not evaluated by this server")
    fields = {}
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        label, equals, value = term.partition("=")
        if not equals or label.endswith("!"):
            raise BadRequestError(f'fieldSelector: Invalid value: "{term[:128]}"')
        fields[label] = value.removeprefix("=")
    return fields


def _split(parts: Sequence[str]) -> tuple[str, str, str]:
    if not 1 <= len(parts) <= 3 or parts[0] not in KINDS:
        raise _no_path()
    resource, name, subresource = [*parts, "", ""][:3]
    if subresource and f"{resource}/{subresource}" not in _SUBRESOURCES:
        raise _no_path()
    return resource, name, subresource


def _verb(method: str, name: str, query: Mapping[str, str]) -> str:
    if method == "GET":
        if query.get("watch", "") in ("true", "1"):
            return "watch"
        return "get" if name else "list"
    if method not in _VERBS:
        raise MethodNotAllowedError(f"{method} is not served here")
    return _VERBS[method]


def _no_path() -> NotFoundError:
    return NotFoundError("the server could not find the requested resource")
