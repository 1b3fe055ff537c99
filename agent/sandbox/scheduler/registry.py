"""The registered nodes and their GPUs.

Source: HAMi v2.10 pkg/scheduler/scheduler.go:register; earlier versions where they differ.
"""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.codec.register import RegisteredGpu
from agent.codec.score import decode_scores
from agent.core.cluster import annotations
from agent.core.errors import MalformedText
from agent.core.inventory.gpu import GpuUuid
from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.model import GpuView, Links, Load, RegisteredNode
from agent.sandbox.scheduler.refresh import (
    NodeSighting,
    Version,
    check_node,
    decode,
    deleted,
    requesting,
)


@dataclass(frozen=True, slots=True)
class Offer:
    """The GPUs that one Node offers, without their use."""

    gpus: tuple[RegisteredGpu, ...]
    cordoned: frozenset[str] = frozenset()
    links: Links = field(default_factory=dict)

    def state(self, name: str, loads: Mapping[GpuUuid, Load]) -> RegisteredNode:
        """The node with the use of its GPUs."""
        states = tuple(GpuView(gpu, loads.get(gpu.uuid, Load())) for gpu in self.gpus)
        return RegisteredNode(name, states, self.cordoned, self.links)


class Registry:
    """The scheduler's registered nodes. Only `ingest` and `forget` change them.

    `changes` counts the changes of the offers.
    """

    def __init__(self, version: Version = Version.V2_10) -> None:
        self.changes = 0
        self._version = version
        self._seen: dict[str, NodeSighting] = {}
        self._nodes: dict[str, Offer] = {}

    def ingest(self, node: Json, now: dt.datetime) -> Mapping[str, str | None]:
        """Ingest one node. Returns the annotations that must be written (None deletes).

        As in HAMi, the former offer stays if the text cannot be decoded.
        """
        name = node["metadata"]["name"]
        noted = node["metadata"].get("annotations") or {}
        offer = read_offer(noted, self._version)
        if offer is None and self._version.marks_deleted:
            return {}
        checkup = check_node(self._seen.setdefault(name, NodeSighting()), node, now, self._version)
        writes: dict[str, str | None] = {}
        if checkup.asks:
            writes[annotations.HANDSHAKE] = requesting(now)
        if not checkup.healthy:
            writes |= self._clean_up(name, now)
        elif checkup.refresh and offer is not None:
            self.changes += self._nodes.get(name) != offer
            self._nodes[name] = offer
        return writes

    def forget(self, name: str) -> None:
        """Drop a node."""
        self.changes += self._nodes.pop(name, None) is not None
        self._seen.pop(name, None)

    def state(self, name: str, loads: Mapping[GpuUuid, Load]) -> RegisteredNode | None:
        """A registered node with the use of its GPUs, or None."""
        if name not in self._nodes:
            return None
        return self._nodes[name].state(name, loads)

    def _clean_up(self, name: str, now: dt.datetime) -> Mapping[str, str | None]:
        """Drop an unhealthy node. From 2.10 on, its counts are also forgotten."""
        if self._version.marks_deleted:
            self.changes += self._nodes.pop(name, None) is not None
            return {annotations.HANDSHAKE: deleted(now)}
        if name not in self._nodes:
            return {}
        self.forget(name)
        return {annotations.HANDSHAKE: None}


def read_offer(noted: Mapping[str, str], version: Version = Version.V2_10) -> Offer | None:
    """The offer of a Node's annotations; None if there is none or it cannot be decoded."""
    gpus = decode(noted.get(annotations.REGISTER, ""), version)
    links = _read_links(noted.get(annotations.SCORE))
    if gpus is None or links is None:
        return None
    words = noted.get(annotations.CORDON, "").split(",")
    return Offer(gpus, frozenset(word.strip() for word in words) - {""}, links)


def _read_links(text: str | None) -> Links | None:
    """The points of pairs of GPUs; None if the text cannot be decoded."""
    try:
        return {} if text is None else decode_scores(text)
    except MalformedText:
        return None
