"""Reads the Node with its status, and the API server's time, for `doctor`."""

import datetime as dt
import email.utils
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from agent.codec.managed import WRITER, entries, other_writer
from agent.codec.narrow import inside
from agent.codec.quantity import decode_quantity
from agent.core.cluster.annotations import REGISTER
from agent.core.errors import ApiError, ApiForbidden, ApiNotFound
from agent.core.node.api_rights import skew_of
from agent.core.node.config_entries import NamedNode
from agent.core.node.scheduling import NodeTraces, OfferSeen
from agent.core.ports import Clock
from agent.host.kube.session import METADATA_ONLY, ApiRequest, KubeSession, decode, path_of

_DATE: Final = "Date"


class NodeSight(msgspec.Struct, frozen=True):
    """The Node, the amounts in its status, and the skew of the API server's clock in seconds."""

    traces: NodeTraces
    offer: OfferSeen
    labels: Mapping[str, str]
    skew: float | None = None


class KubeSight:
    """Sends each request once, with the session's deadline of 10 s."""

    def __init__(self, session: KubeSession, clock: Clock) -> None:
        self._session = session
        self._clock = clock

    async def look(self, node: str, resource: str) -> NodeSight:
        """Get the Node. Raises ApiNotFound, ApiError."""
        request = ApiRequest("get", "nodes", path_of("nodes", node))
        before = self._clock.now()
        body, headers = await self._session.exchange(request)
        after = self._clock.now()
        sent = _time(headers.get(_DATE, ""))
        skew = None if sent is None else skew_of(sent, before, after)
        found = decode(request, body)
        if inside(found, "metadata").get("name") != node:
            raise ApiError(f"{request.what}: the answer has no name, or another one")
        labels = inside(inside(found, "metadata"), "labels")
        texts = {key: str(value) for key, value in labels.items()}
        return NodeSight(_traces(node, found), _offer(found, resource), texts, skew)

    async def named(self, node: str) -> NamedNode:
        """Look whether a Node of this name exists. Raises ApiError."""
        request = ApiRequest("get", "nodes", path_of("nodes", node), accept=METADATA_ONLY)
        try:
            await self._session.call(request)
        except ApiNotFound:
            return NamedNode.MISSING
        except ApiForbidden:  # a node's own identity may read only its own Node
            return NamedNode.UNSEEN
        return NamedNode.THERE


def _traces(name: str, node: Mapping[str, Any]) -> NodeTraces:
    metadata = inside(node, "metadata")
    managed = entries(metadata)
    agents = [entry for entry in managed if entry.writer == WRITER]
    return NodeTraces(
        name,
        {key: str(value) for key, value in inside(metadata, "annotations").items()},
        frozenset(key for entry in agents for key in entry.annotations),
        max((entry.time for entry in agents), default=""),
        other_writer(managed, REGISTER),
    )


def _offer(node: Mapping[str, Any], resource: str) -> OfferSeen:
    status = inside(node, "status")

    def amount(of: str) -> int:
        value = inside(status, of).get(resource)
        return max(0, decode_quantity(str(value)) or 0) if value is not None else 0

    return OfferSeen(resource, amount("allocatable"), amount("capacity"))


def _time(text: str) -> dt.datetime | None:
    """The time in an HTTP header, in UTC; None if there is none."""
    try:
        return email.utils.parsedate_to_datetime(text).astimezone(dt.UTC)
    except ValueError:
        return None
