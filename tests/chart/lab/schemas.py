"""Schemas of Kubernetes for kubeconform, from those that the package kubernetes-validate holds.

There they share one file of definitions by paths that kubeconform does not follow. Here each kind
carries what it refers to.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kubernetes_validate

VERSIONS: Final = tuple(f"1.{minor}" for minor in range(26, 38))
_ROOT: Final = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
_OWN: Final = "#/$defs/"


def write_schemas(version: str, folder: Path, kinds: frozenset[str]) -> None:
    """Write the schemas of these kinds, in small letters, one file for each version of each."""
    source = _ROOT / f"v{version}.0-local-strict"
    definitions = json.loads((source / "_definitions.json").read_bytes())["$defs"]
    for path in sorted(source.glob("*.json")):
        if path.name.partition("-")[0] in kinds:
            schema = _own_references(json.loads(path.read_bytes()))
            schema["$defs"] = _reached(schema, definitions)
            (folder / path.name).write_text(json.dumps(schema))


def _own_references(value: Any) -> Any:
    """The same with references into the file itself; a property may be named $ref, too."""
    if isinstance(value, list):
        return [_own_references(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: _own_references(one) for key, one in value.items() if not _is_note(key, one)}
    target = found.get("$ref")
    if isinstance(target, str):
        found["$ref"] = _OWN + target.rpartition("/")[2]
    return found


def _is_note(key: str, value: object) -> bool:
    return key in {"$id", "$schema", "description"} and isinstance(value, str)


def _reached(schema: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    reached: dict[str, Any] = {}
    waiting = list(_targets(schema))
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached[name] = _own_references(definitions[name])
            waiting.extend(_targets(reached[name]))
    return reached


def _targets(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _targets(one)
    elif isinstance(value, dict):
        target = value.get("$ref")
        if isinstance(target, str):
            yield target.removeprefix(_OWN)
        for one in value.values():
            yield from _targets(one)
