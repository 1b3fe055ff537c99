"""Who wrote what on a Node: the API server keeps it in metadata.managedFields."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from agent.core.errors import MalformedText
from agent.core.leftovers import NodeTraces
from agent.core.node_condition import GPU_DEGRADED

WRITER: Final = "hami-agent"
"""The agent's name there: its User-Agent up to the slash."""
CONDITION: Final = f'k:{{"type":"{GPU_DEGRADED}"}}'


def decode_traces(obj: Mapping[str, Any]) -> NodeTraces:
    """A Node of which at least the metadata is there. Raises MalformedText."""
    metadata = _inside(obj, "metadata")
    name, version = metadata.get("name"), metadata.get("resourceVersion")
    if not isinstance(name, str) or not isinstance(version, str):
        raise MalformedText("a Node has no name, or no resourceVersion")
    written = tuple(_written(metadata))
    keys = (_inside(_inside(one, "f:metadata"), "f:annotations") for one in written)
    conditions = (_inside(_inside(one, "f:status"), "f:conditions") for one in written)
    return NodeTraces(
        name,
        version,
        {key: str(value) for key, value in _inside(metadata, "annotations").items()},
        frozenset(key.removeprefix("f:") for some in keys for key in some),
        condition=any(CONDITION in some for some in conditions),
    )


def _written(metadata: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The fields of each entry of an agent's."""
    entries = metadata.get("managedFields")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("manager") == WRITER:
            yield _inside(entry, "fieldsV1")


def _inside(obj: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = obj.get(key)
    return value if isinstance(value, dict) else {}
