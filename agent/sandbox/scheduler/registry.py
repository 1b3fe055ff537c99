"""Which nodes are registered and with which GPUs: when the scheduler reads an annotation again.

Source: HAMi v2.10 pkg/scheduler/scheduler.go:register, nvidia/device.go:CheckHealth.
"""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent.codec.register import RegisteredGpu, decode_register
from agent.core import annotations
from agent.core.errors import MalformedText
from agent.core.gpu import GpuUuid
from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.model import GpuState, Load, NodeState
from agent.sandbox.scheduler.requests import COUNT, parse_quantity

REQUESTING: Final = "Requesting"
_STALE: Final = dt.timedelta(seconds=60)
_STAMP: Final = "%Y-%m-%d %H:%M:%S"


@dataclass(slots=True)
class Sighting:
    """What was last seen of a node; the refresh rule compares with it."""

    allocatable: int = 0
    annotation: str = ""


@dataclass(frozen=True, slots=True)
class Checkup:
    """The refresh rule's answer; `asks` means that `Requesting_<now>` is to be written."""

    healthy: bool
    refresh: bool
    asks: bool


def check_node(seen: Sighting, node: Json, now: dt.datetime) -> Checkup:
    """Apply the refresh rule of v2.10 to one node; `seen` is brought up to date."""
    noted = node["metadata"].get("annotations") or {}
    allocatable = parse_quantity(_allocatable(node)) or 0
    healthy, refresh, asks = _check_handshake(
        noted.get(annotations.HANDSHAKE, ""), allocatable, now
    )
    text = noted.get(annotations.REGISTER, "")
    if allocatable == 0 and seen.allocatable == 0:
        return Checkup(healthy, refresh, asks)
    if allocatable != seen.allocatable:
        seen.allocatable, seen.annotation = allocatable, text
        if allocatable == 0:
            return Checkup(healthy=False, refresh=refresh, asks=asks)
        return Checkup(healthy=True, refresh=True, asks=asks)
    changed = text != seen.annotation
    seen.annotation = text
    return Checkup(healthy, refresh or changed, asks)


class Registry:
    """The scheduler's memory of nodes; it changes only by `ingest` and `forget`.

    `changes` counts how often what it offers became another.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._seen: dict[str, Sighting] = {}
        self._nodes: dict[str, tuple[tuple[RegisteredGpu, ...], frozenset[str]]] = {}

    def ingest(self, node: Json, now: dt.datetime) -> Mapping[str, str | None]:
        """Look at one node; the answer is what must be written to its annotations (None deletes).

        Undecodable text leaves what was known on offer, as HAMi does.
        """
        name = node["metadata"]["name"]
        noted = node["metadata"].get("annotations") or {}
        gpus = _decode(noted.get(annotations.REGISTER, ""))
        checkup = check_node(self._seen.setdefault(name, Sighting()), node, now)
        writes: dict[str, str | None] = {}
        if checkup.asks:
            writes[annotations.HANDSHAKE] = f"{REQUESTING}_{now.strftime(_STAMP)}"
        if not checkup.healthy:
            if name in self._nodes:
                self.forget(name)
                writes[annotations.HANDSHAKE] = None
        elif checkup.refresh and gpus is not None:
            words = noted.get(annotations.CORDON, "").split(",")
            self._offer(name, gpus, frozenset(word.strip() for word in words) - {""})
        return writes

    def forget(self, name: str) -> None:
        """Drop a node with all that was seen of it."""
        self.changes += self._nodes.pop(name, None) is not None
        self._seen.pop(name, None)

    def state(self, name: str, loads: Mapping[GpuUuid, Load]) -> NodeState | None:
        """A registered node with what is used of it, or None."""
        if name not in self._nodes:
            return None
        gpus, cordoned = self._nodes[name]
        states = tuple(GpuState(gpu, loads.get(gpu.uuid, Load())) for gpu in gpus)
        return NodeState(name, states, cordoned)

    def _offer(self, name: str, gpus: tuple[RegisteredGpu, ...], cordoned: frozenset[str]) -> None:
        self.changes += self._nodes.get(name) != (gpus, cordoned)
        self._nodes[name] = (gpus, cordoned)


def _check_handshake(text: str, allocatable: int, now: dt.datetime) -> tuple[bool, bool, bool]:
    """The rule that all vendors share: healthy, refresh, asks."""
    if REQUESTING not in text:
        return True, True, True
    _, _, stamp = text.partition("_")
    try:
        asked = dt.datetime.strptime(stamp, _STAMP).replace(tzinfo=dt.UTC)
    except ValueError:
        return True, False, False
    return now - asked < _STALE or allocatable > 0, False, False


def _allocatable(node: Json) -> object:
    return ((node.get("status") or {}).get("allocatable") or {}).get(COUNT, "")


def _decode(text: str) -> tuple[RegisteredGpu, ...] | None:
    try:
        return decode_register(text)
    except MalformedText:
        return None
