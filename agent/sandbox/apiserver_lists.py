"""LIST, whole or in chunks. All chunks of a list show the objects as of its beginning."""

import base64
import json
from typing import Final

from agent.core.cluster.selector import Selector, parse_selector
from agent.core.errors import MalformedText
from agent.sandbox.api_errors import BadRequestError, GoneError, Json, TooNewError
from agent.sandbox.apiserver_access import Target
from agent.sandbox.apiserver_paths import number
from agent.sandbox.store import KINDS, ObjectStore

_TOO_OLD: Final = (
    "The provided continue parameter is too old to display a consistent list result. You can start "
    "a new list without the continue parameter, or use the continue token in this response to "
    "retrieve the remainder of the results. Continuing with the provided token results in an "
    "inconsistent list - objects that were created, modified, or deleted between the time the "
    "first chunk was returned and now may show up in the list."
)
_NOW: Final = -1
"""The version in a continue token that continues with the present objects."""


def require_reached(store: ObjectStore, target: Target) -> None:
    """Check the minimum version of a GET or LIST. The real server waits 3 s for it first.

    Raises:
        BadRequestError: it is not a number.
        TooNewError: the store has not reached it.
    """
    version = target.options.get("resourceVersion", "")
    if version and not version.isdecimal():
        detail = f'resourceVersion: Invalid value: "{version[:64]}": strconv.ParseUint: parsing '
        raise BadRequestError(f'invalid resource version: {detail}"{version[:64]}": invalid syntax')
    if version and int(version) > store.version:
        detail = f"Too large resource version: {version}, current: {store.version}"
        raise TooNewError(f"Timeout: {detail}", {"Retry-After": "1"})


def list_objects(store: ObjectStore, target: Target) -> Json:
    """The list that a request asks for. `limit` and `continue` select a chunk.

    Raises:
        BadRequestError: an option or a selector is malformed.
        GoneError: the list began too long ago; the error has a token with which to continue.
        TooNewError: a version that the store has not reached.
    """
    limit, token = number(target.options, "limit"), target.options.get("continue", "")
    version, start = (store.version, None) if not token else _opened(token)
    if token and target.options.get("resourceVersion"):
        raise BadRequestError("specifying resource version is not allowed when using continue")
    require_reached(store, target)
    selector = _selector(target)
    try:
        found = _select(store, target, version if token else _NOW)
    except GoneError as gone:
        raise GoneError(_TOO_OLD, metadata={"continue": _token(_NOW, start)}) from gone
    found = [item for item in found if selector.matches(item["metadata"].get("labels") or {})]
    left = [item for item in found if start is None or _place(item) > start]
    shown = left[:limit] if limit else left
    metadata: Json = {"resourceVersion": str(store.version if version == _NOW else version)}
    if len(shown) < len(left):
        metadata["continue"] = _token(version, _place(shown[-1]))
        if not (target.fields or selector.requirements):
            metadata["remainingItemCount"] = len(left) - len(shown)
    return {
        "kind": KINDS[target.resource] + "List",
        "apiVersion": "v1",
        "metadata": metadata,
        "items": [_nameless(item) for item in shown],
    }


def _select(store: ObjectStore, target: Target, version: int) -> list[Json]:
    return store.select(
        target.resource,
        namespace=target.namespace or None,
        fields=target.fields,
        at=None if version == _NOW else version,
    )


def _selector(target: Target) -> Selector:
    text = target.options.get("labelSelector", "")
    try:
        return parse_selector(text) if text else Selector()
    except MalformedText as malformed:
        raise BadRequestError(f"unable to parse requirement: {malformed}"[:256]) from malformed


def _place(item: Json) -> list[str]:
    return [item["metadata"].get("namespace", ""), item["metadata"]["name"]]


def _nameless(item: Json) -> Json:
    """An item without its kind, which only the list names."""
    return {key: value for key, value in item.items() if key not in ("kind", "apiVersion")}


def _token(version: int, start: list[str] | None) -> str:
    text = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": start})
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _opened(token: str) -> tuple[int, list[str] | None]:
    try:
        held = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return int(held["rv"]), held["start"]
    except (ValueError, KeyError, TypeError) as malformed:
        detail = f"invalid continue token: continue key is not valid: {malformed}"
        raise BadRequestError(detail[:256]) from malformed
