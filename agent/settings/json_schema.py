"""Makes the JSON schema of the agent's own file from the table of settings, for editors."""

from collections.abc import Iterable, Mapping
from typing import Final

from agent.settings.fields import Field
from agent.settings.own_file import LIVE
from agent.settings.table import FIELDS

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"

_TEXTS: Final[Mapping[str, object]] = {
    "type": "array",
    "items": {"type": "string", "minLength": 1},
    "minItems": 1,
}
_MATCH: Final[Mapping[str, object]] = {
    "type": "object",
    "description": "Which nodes: every condition here must hold.",
    "additionalProperties": False,
    "minProperties": 1,
    "properties": {
        "nodes": {**_TEXTS, "description": "Names of nodes; * and ? stand for any characters."},
        "labels": {
            "type": "string",
            "minLength": 1,
            "description": "A label selector in kubectl's form.",
        },
    },
}


def json_schema() -> dict[str, object]:
    """The schema of the whole file."""
    profile = _section(LIVE.values())
    profile["required"] = ["name", "match"]
    profile["type"] = "object"
    profile["properties"] = {
        "name": {"type": "string", "minLength": 1, "description": "Name in messages."},
        "match": _MATCH,
        **_properties(profile),
    }
    whole = _section(FIELDS)
    properties = _properties(whole) | {
        "profiles": {
            "type": ["array", "null"],
            "description": "Settings for some nodes; a later profile wins.",
            "items": profile,
        }
    }
    return {
        "$schema": DRAFT,
        "title": "hami-agent's settings",
        **whole,
        "properties": properties,
    }


def _section(fields: Iterable[Field]) -> dict[str, object]:
    """The schema of a mapping with these settings, nested by the dots in their keys."""
    root: dict[str, object] = _empty()
    for field in fields:
        *parents, name = field.key.split(".")
        here = root
        for parent in parents:
            child = _properties(here).setdefault(parent, _empty())
            here = child if isinstance(child, dict) else here
        _properties(here)[name] = _leaf(field)
    return root


def _empty() -> dict[str, object]:
    """A section without keys. YAML reads null if all its keys are commented out."""
    return {"type": ["object", "null"], "additionalProperties": False, "properties": {}}


def _properties(section: dict[str, object]) -> dict[str, object]:
    found = section["properties"]
    return found if isinstance(found, dict) else {}


def _leaf(field: Field) -> dict[str, object]:
    leaf: dict[str, object] = {**field.read.schema, "description": field.text}
    default = field.read.write(field.default)
    if default is not None:
        leaf["default"] = list(default) if isinstance(default, tuple) else default
    return leaf
