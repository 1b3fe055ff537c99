"""A Node as an uninstallation reads it: who wrote what there, and what the Node says itself."""

from collections.abc import Mapping
from typing import Any, Final

from agent.codec.managed import WRITER, entries, other_writer
from agent.codec.parts import inside, objects_in
from agent.codec.quantity import decode_quantity
from agent.core.cluster.annotations import REGISTER
from agent.core.errors import MalformedText
from agent.core.health.news import GPU_DEGRADED
from agent.core.node.leftovers import NodeLeftovers, NodeTraces

CONDITION: Final = f'k:{{"type":"{GPU_DEGRADED}"}}'


def decode_traces(obj: Mapping[str, Any]) -> NodeTraces:
    """A Node of which at least the metadata is there. Raises MalformedText."""
    metadata = inside(obj, "metadata")
    name, version = metadata.get("name"), metadata.get("resourceVersion")
    if not isinstance(name, str) or not isinstance(version, str):
        raise MalformedText("a Node has no name, or no resourceVersion")
    managed = entries(metadata)
    agents = [one for one in managed if one.writer == WRITER]
    conditions = (inside(inside(one.fields, "f:status"), "f:conditions") for one in agents)
    return NodeTraces(
        name,
        version,
        {key: str(value) for key, value in inside(metadata, "annotations").items()},
        frozenset(key for one in agents for key in one.annotations),
        condition=any(CONDITION in some for some in conditions),
        last_written=max((one.time for one in agents), default=""),
        reported_by=other_writer(managed, REGISTER),
        is_kept=any(REGISTER in one.annotations for one in managed),
    )


def decode_state(obj: Mapping[str, Any], resource: str) -> NodeLeftovers:
    """A whole Node. What is missing or of another shape counts as absent."""
    status = inside(obj, "status")
    conditions = {one.get("type"): one.get("status") for one in objects_in(status, "conditions")}
    # False is the kubelet's own word; Unknown is said by others, when it has fallen silent.
    kubelet = conditions.get("Ready", "Unknown") != "Unknown"
    allocatable = inside(status, "allocatable").get(resource)
    served = decode_quantity(str(allocatable)) if allocatable is not None else 0
    return NodeLeftovers(
        kubelet=kubelet,
        served=max(0, served or 0) if kubelet else 0,
        degraded=GPU_DEGRADED in conditions,
    )
