"""Decodes a Node for an uninstallation: which annotations agents wrote, and the Node's status."""

from collections.abc import Mapping
from typing import Any, Final

from agent.codec.managed import WRITER, entries, other_writer
from agent.codec.narrow import inside, objects_in
from agent.codec.quantity import decode_quantity
from agent.core.cluster.annotations import REGISTER
from agent.core.errors import MalformedText
from agent.core.health.news import GPU_DEGRADED
from agent.core.node.leftovers import NodeLeftovers, NodeTraces

CONDITION: Final = f'k:{{"type":"{GPU_DEGRADED}"}}'


def decode_traces(obj: Mapping[str, Any]) -> NodeTraces:
    """Decode what agents left on a Node, from its metadata. Raises MalformedText."""
    metadata = inside(obj, "metadata")
    name, version = metadata.get("name"), metadata.get("resourceVersion")
    if not isinstance(name, str) or not isinstance(version, str):
        raise MalformedText("a Node has no name, or no resourceVersion")
    managed = entries(metadata)
    agents = [entry for entry in managed if entry.writer == WRITER]
    conditions = (inside(inside(entry.fields, "f:status"), "f:conditions") for entry in agents)
    return NodeTraces(
        name,
        version,
        {key: str(value) for key, value in inside(metadata, "annotations").items()},
        frozenset(key for entry in agents for key in entry.annotations),
        condition=any(CONDITION in fields for fields in conditions),
        last_written=max((entry.time for entry in agents), default=""),
        reported_by=other_writer(managed, REGISTER),
        is_kept=any(REGISTER in entry.annotations for entry in managed),
    )


def decode_state(obj: Mapping[str, Any], resource: str) -> NodeLeftovers:
    """Decode the status of a Node. Parts that are missing or malformed count as absent."""
    status = inside(obj, "status")
    conditions = {item.get("type"): item.get("status") for item in objects_in(status, "conditions")}
    # The kubelet writes True and False; the controller writes Unknown when the kubelet is silent.
    kubelet = conditions.get("Ready", "Unknown") != "Unknown"
    allocatable = inside(status, "allocatable").get(resource)
    served = decode_quantity(str(allocatable)) if allocatable is not None else 0
    return NodeLeftovers(
        kubelet=kubelet,
        served=max(0, served or 0) if kubelet else 0,
        degraded=GPU_DEGRADED in conditions,
    )
