"""The three kinds of patch of the API server, as pure functions on JSON values.

`difference` makes a JSON patch.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

from agent.sandbox.api_errors import BadRequestError, InvalidError, Json, UnclassifiedError

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

    It supports `$patch: delete` and `$patch: replace`. It ignores `$setElementOrder/…`, which only
    orders a list.

    Raises:
        BadRequestError: another directive, which the real server may support.
        UnclassifiedError: an unknown value of `$patch`, an element without its merge key.
    """
    directive = patch.get("$patch")
    if directive == "replace":
        return {key: deepcopy(value) for key, value in patch.items() if key != "$patch"}
    if directive is not None:
        text = f"unknown patch type: {directive} in map: {_go_map(patch)}"
        raise UnclassifiedError(text[:256])
    merged = dict(target)
    for key, value in patch.items():
        if key.startswith("$"):
            if not key.startswith("$setElementOrder/"):
                raise BadRequestError(f"patch directive not supported: {key}")
        elif value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_value(key, merged.get(key), value)
    return merged


def _merge_value(key: str, held: object, value: object) -> object:
    if isinstance(value, dict):
        return strategic_merge_patch(held if isinstance(held, dict) else {}, value)
    if isinstance(value, list) and key in MERGE_KEYS:
        return _merge_list(MERGE_KEYS[key], held if isinstance(held, list) else [], value)
    return deepcopy(value)


def _merge_list(by: str, held: Sequence[Json], patch: Sequence[Json]) -> list[Json]:
    merged = {entry.get(by): entry for entry in held}
    for entry in patch:
        if by not in entry:
            text = f"map: {_go_map(entry)} does not contain declared merge key: {by}"
            raise UnclassifiedError(text[:256])
        if entry.get("$patch") == "delete":
            merged.pop(entry[by], None)
        else:
            merged[entry[by]] = strategic_merge_patch(merged.get(entry[by], {}), entry)
    return list(merged.values())


def json_patch(target: Json, operations: Sequence[Json]) -> Json:
    """Apply a JSON patch (RFC 6902), all of it or nothing.

    Against the RFC, `replace` of an absent member adds it, as in the real server's library
    (gopkg.in/evanphx/json-patch.v4).

    Raises:
        InvalidError: a test fails, a path does not exist, or an operation is malformed.
    """
    result = deepcopy(target)
    for operation in operations:
        for step in _steps(result, operation):
            _apply(result, step)
    return result


def difference(before: Json, after: Json, path: str = "") -> list[Json]:
    """The JSON patch from `before` to `after`. Lists of another length are replaced whole."""
    changes: list[Json] = []
    for key in sorted(before.keys() | after.keys()):
        here = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
        if key not in after:
            changes.append({"op": "remove", "path": here})
        elif key not in before:
            changes.append({"op": "add", "path": here, "value": after[key]})
        else:
            changes += _change(before[key], after[key], here)
    return changes


def _change(before: object, after: object, path: str) -> list[Json]:
    if isinstance(before, dict) and isinstance(after, dict):
        return difference(before, after, path)
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [change for n, (old, new) in pairs for change in _change(old, new, f"{path}/{n}")]
    if type(before) is type(after) and before == after:
        return []
    return [{"op": "replace", "path": path, "value": after}]


def _steps(document: Json, operation: Json) -> list[Json]:
    """The operation in terms of add, replace, remove and test."""
    name, path, origin = (operation.get(key) for key in ("op", "path", "from"))
    if name in ("move", "copy") and isinstance(origin, str):
        value = deepcopy(_walk(document, _parts(origin), origin))
        start = [{"op": "remove", "path": origin}] if name == "move" else []
        return [*start, {"op": "add", "path": path, "value": value}]
    if name not in ("add", "replace", "remove", "test") or not isinstance(path, str):
        raise InvalidError(f"unexpected JSON patch operation: {operation}"[:256])
    return [operation]


def _parts(path: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]


def _apply(document: Json, operation: Json) -> None:
    name, path = operation["op"], operation["path"]
    parts = _parts(path)
    if not parts:
        raise InvalidError(f"{name} operation does not apply: doc is whole")
    holder = _walk(document, parts[:-1], path)
    if isinstance(holder, list):
        _apply_to_list(holder, name, parts[-1], operation)
    elif isinstance(holder, dict):
        _apply_to_map(holder, name, parts[-1], operation)
    else:
        raise _missing(name, path)


def _apply_to_map(holder: Json, name: str, key: str, operation: Json) -> None:
    if name == "test":
        if holder.get(key) != operation.get("value"):
            raise InvalidError(f"testing value {operation['path']} failed")
    elif name != "remove":
        holder[key] = deepcopy(operation.get("value"))
    elif key not in holder:
        raise _missing(name, operation["path"])
    else:
        del holder[key]


def _apply_to_list(holder: list[Any], name: str, key: str, operation: Json) -> None:
    size = len(holder)
    if name == "add":
        holder.insert(size if key == "-" else _index(key, size + 1, operation), operation["value"])
        return
    index = _index(key, size, operation)
    if name == "test":
        if holder[index] != operation.get("value"):
            raise InvalidError(f"testing value {operation['path']} failed")
    elif name == "remove":
        del holder[index]
    else:
        holder[index] = deepcopy(operation.get("value"))


def _walk(document: Json, parts: Sequence[str], path: str) -> object:
    here: object = document
    for part in parts:
        if isinstance(here, dict) and part in here:
            here = here[part]
        elif isinstance(here, list) and part.isdecimal() and int(part) < len(here):
            here = here[int(part)]
        else:
            raise _missing("walk", path)
    return here


def _index(key: str, size: int, operation: Json) -> int:
    if not key.isdecimal() or int(key) >= size:
        raise _missing(operation["op"], operation["path"])
    return int(key)


def _missing(name: str, path: str) -> InvalidError:
    return InvalidError(f"{name} operation does not apply: doc is missing path: {path}"[:256])


def _go_map(value: Json) -> str:
    """A map of strings as Go prints it."""
    return "map[" + " ".join(f"{key}:{value[key]}" for key in sorted(value)) + "]"
