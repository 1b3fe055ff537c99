"""The three kinds of patch of the API server, as pure functions on JSON values."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

from agent.sandbox.api_errors import BadRequestError, InvalidError, Json

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
