"""The register annotation as the API server shows it, and who wrote it how often."""

from dataclasses import dataclass
from typing import Any, Final

from agent import cluster as annotations
from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.identities import NODE, NODE_USER
from tests.peers.lab.node_state import node_of, notes_of, registered
from tests.peers.lab.tidy import NODE_PATH
from tests.peers.lab.waiting import until_answer

_PATCH: Final = "patch nodes"
_OK: Final = 200
_EVENTS: Final = "/api/v1/namespaces/default/events"


@dataclass(frozen=True, slots=True)
class Told:
    """What the annotation says of all GPUs alike."""

    gpus: int
    count: int
    mib: int = 81559
    cores: int = 100


def told(node: Object) -> Told | None:
    """What a Node's annotation says; None where there is none, or GPUs differ."""
    found = registered(node)
    alike = {(one["count"], one["devmem"], one["devcore"]) for one in found}
    return Told(len(found), *next(iter(alike))) if len(alike) == 1 else None


async def until_told(cluster: Cluster, wanted: Told, since: float, within: float) -> float:
    """When the Node was first seen to say it, after a moment; both by the loop's clock.

    Raises:
        TimeoutError: it does not.
    """

    def seen() -> float | None:
        return cluster.nodes.when(NODE, lambda node: wanted == told(node), since=since)

    try:
        await cluster.nodes.until(lambda: seen() is not None, within, f"{wanted} is not told")
    except TimeoutError as error:
        raise TimeoutError(f"{error}: {told(node_of(cluster))}") from None
    found = seen()
    assert found is not None
    return found


def register_text(cluster: Cluster) -> str | None:
    """The annotation as the watch has it now."""
    return notes_of(node_of(cluster)).get(annotations.REGISTER)


async def write_register(cluster: Cluster, text: str | None) -> None:
    """Write the annotation as somebody else, or remove it."""
    marks = {annotations.REGISTER: text}
    await cluster.api.patch(NODE_PATH, {"metadata": {"annotations": marks}})


def node_writes(cluster: Cluster, mark: int, *, done: bool = False) -> int:
    """How often the agent has tried to write to the Node since a mark in the audit log.

    `done`: how often the API server did so.
    """
    asked = cluster.plane.audit.since(mark, NODE_USER)
    tries = [one for one in asked if f"{one.verb} {one.resource}" == _PATCH]
    return sum(one.code == _OK or not done for one in tries)


async def until_node_writes(cluster: Cluster, mark: int, count: int) -> None:
    """Return once the audit log has so many writes to the Node, which it may show late.

    Raises:
        TimeoutError: it has not.
    """

    async def is_told() -> bool:
        return node_writes(cluster, mark) >= count

    await until_answer(is_told, 20.0, lambda: f"{node_writes(cluster, mark)}, not {count} writes")


async def node_events(cluster: Cluster, reason: str) -> list[Object]:
    """The Events with that reason about the Node."""
    query = f"reason={reason},involvedObject.kind=Node,involvedObject.name={NODE}"
    found: list[dict[str, Any]] = (await cluster.api.get(_EVENTS, fieldSelector=query))["items"]
    return found


async def forget_events(cluster: Cluster, reason: str) -> None:
    """Delete the Events with that reason about the Node: earlier tests leave them for an hour."""
    for one in await node_events(cluster, reason):
        await cluster.api.delete(f"{_EVENTS}/{one['metadata']['name']}")


async def until_node_events(
    cluster: Cluster, reason: str, count: int, within: float = 20.0
) -> None:
    """Return once so many Events with that reason are about the Node. Raises TimeoutError."""

    async def are_there() -> bool:
        return len(await node_events(cluster, reason)) >= count

    await until_answer(are_there, within, lambda: f"not {count} Events {reason}")


async def until_node_event(cluster: Cluster, reason: str, within: float = 20.0) -> Object:
    """The one Event with that reason about the Node. Raises TimeoutError: there is none."""
    await until_node_events(cluster, reason, 1, within)
    (event,) = await node_events(cluster, reason)
    return event
