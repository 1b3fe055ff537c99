"""The registered nodes and their GPUs: how and when each scheduler version reads an annotation.

Source: HAMi v2.7.1 to v2.10.0 pkg/scheduler/scheduler.go:register, nvidia/device.go:CheckHealth and
GetNodeDevices, pkg/device/devices.go:CheckHealth.
"""

import contextlib
import datetime as dt
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from agent import cluster as annotations
from agent.errors import MalformedText, cap
from agent.hami.annotations import Int64, RegisteredGpu, decode_either, is_json_form
from agent.model import GpuUuid
from agent.sandbox.scheduler.model import (
    COUNT,
    GpuView,
    Links,
    Load,
    RegisteredNode,
    parse_quantity,
)
from agent.sandbox.store import Json

REQUESTING: Final = "Requesting"
DELETED: Final = "Deleted"
_WORDS: Final = ("Reported", REQUESTING, DELETED)
"""An agent's or plugin's: the report is new. The scheduler's: it read the report and waits; nobody
answered, and the node's GPUs are dropped."""
_STALE: Final = dt.timedelta(seconds=60)
_STAMP: Final = "%Y-%m-%d %H:%M:%S"
_HANDSHAKE: Final = re.compile(
    r"[ _](?P<date>[0-9]{4}[-.][0-9]{2}[-.][0-9]{2})"
    r" (?P<time>[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?)"
    r"(?: (?P<offset>[+-][0-9]{4}) \S{1,16})?(?: m=[+-][0-9.]{1,32})?"
)


def decode_handshake(text: str) -> tuple[str, dt.datetime | None]:
    """Decode the word at the beginning of the text, and the time after it; None: it has none.

    The time is naive if the text names no zone: a scheduler writes its local time without it, and
    those of v2.4 have dots in the date. Schedulers act on the word even without a valid time.
    Raises MalformedText: the text begins with none of the words.
    """
    word = next(filter(text.startswith, _WORDS), "")
    if not word:
        words = ", ".join(_WORDS)
        raise MalformedText(f"handshake {cap(text)!r} begins with none of {words}")

    stamp = None
    if match := _HANDSHAKE.fullmatch(text.removeprefix(word)):
        date = match["date"].replace(".", "-")
        with contextlib.suppress(ValueError):
            stamp = dt.datetime.fromisoformat(f"{date}T{match['time']}{match['offset'] or ''}")
    return word, stamp


class Version(enum.Enum):
    """The releases of HAMi's scheduler that read a Node in the same way."""

    V2_7 = "2.5 to 2.7.1"
    V2_8 = "2.8"
    V2_9 = "2.9"
    V2_10 = "2.10"

    @property
    def reads_json(self) -> bool:
        """True from 2.8 on. Earlier releases read records of fields."""
        return self is not Version.V2_7

    @property
    def marks_deleted(self) -> bool:
        """True if a dropped node gets `Deleted_<now>`. Later releases remove its handshake.

        These releases ignore a node while its annotation cannot be decoded.
        """
        return self is not Version.V2_10


@dataclass(slots=True)
class NodeSighting:
    """The last seen state of a node, with which the refresh rule compares."""

    allocatable: int = 0
    annotation: str = ""


@dataclass(frozen=True, slots=True)
class Checkup:
    """The refresh rule's answer. `asks`: write `Requesting_<now>`."""

    healthy: bool
    refresh: bool
    asks: bool = False


def check_node(
    seen: NodeSighting, node: Json, now: dt.datetime, version: Version = Version.V2_10
) -> Checkup:
    """Apply the version's refresh rule to one node, and update `seen`."""
    noted = node["metadata"].get("annotations") or {}
    offered = ((node.get("status") or {}).get("allocatable") or {}).get(COUNT, "")
    allocatable, before = parse_quantity(offered) or 0, seen.allocatable
    checkup = _check_handshake(noted.get(annotations.HANDSHAKE, ""), allocatable, now, version)
    if not version.reads_json or allocatable == before == 0:
        return checkup
    # From 2.8 on the slices that the kubelet offers are compared; from 2.10 on also the text.
    text = noted.get(annotations.REGISTER, "")
    is_new = version is Version.V2_10 and text != seen.annotation
    seen.allocatable, seen.annotation = allocatable, text
    if allocatable == 0:
        return Checkup(healthy=False, refresh=checkup.refresh, asks=checkup.asks)
    if allocatable != before:
        return Checkup(healthy=True, refresh=True, asks=checkup.asks)
    return Checkup(checkup.healthy, checkup.refresh or is_new, checkup.asks)


def _check_handshake(text: str, allocatable: int, now: dt.datetime, version: Version) -> Checkup:
    """The rule of the handshake. 2.8 has none for NVIDIA's GPUs."""
    try:
        stamp = dt.datetime.strptime(text.partition("_")[2], _STAMP).replace(tzinfo=dt.UTC)
        is_fresh = now - stamp < _STALE
    except ValueError:
        # Up to 2.7.1 a request without a time has run out; later it never does.
        is_fresh = version.reads_json
    if version is Version.V2_8:
        return Checkup(healthy=True, refresh=False)
    if REQUESTING in text:
        is_served = version.reads_json and allocatable > 0
        return Checkup(healthy=is_fresh or is_served, refresh=False)
    is_dropped = version is Version.V2_7 or (version is Version.V2_9 and is_fresh)
    if DELETED in text and is_dropped:
        return Checkup(healthy=True, refresh=False)
    return Checkup(healthy=True, refresh=True, asks=True)


def decode(text: str, version: Version | None) -> tuple[RegisteredGpu, ...] | None:
    """The GPUs that the version reads, or None if it cannot; `version` None: one that reads it."""
    if version is not None and version.reads_json != is_json_form(text):
        return None
    try:
        return decode_either(text)
    except MalformedText:
        return None


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
        offer = read_offer(node["metadata"].get("annotations") or {}, self._version)
        if offer is None and self._version.marks_deleted:
            return {}
        checkup = check_node(self._seen.setdefault(name, NodeSighting()), node, now, self._version)
        if checkup.healthy:
            if checkup.refresh and offer is not None:
                self.changes += self._nodes.get(name) != offer
                self._nodes[name] = offer
        elif self._version.marks_deleted:
            self.changes += self._nodes.pop(name, None) is not None
            return {annotations.HANDSHAKE: f"{DELETED}_{now.strftime(_STAMP)}"}
        elif name in self._nodes:
            self.forget(name)
            return {annotations.HANDSHAKE: None}
        stamp = f"{REQUESTING}_{now.strftime(_STAMP)}"
        return {annotations.HANDSHAKE: stamp} if checkup.asks else {}

    def forget(self, name: str) -> None:
        """Drop a node, with its counts."""
        self.changes += self._nodes.pop(name, None) is not None
        self._seen.pop(name, None)

    def state(self, name: str, loads: Mapping[GpuUuid, Load]) -> RegisteredNode | None:
        """A registered node with the use of its GPUs, or None."""
        offer = self._nodes.get(name)
        return offer.state(name, loads) if offer else None


class _PairPoints(msgspec.Struct, frozen=True):
    """One GPU's points with the others. Source: HAMi pkg/device/devices.go, DecodePairScores."""

    uuid: GpuUuid = GpuUuid("")
    score: dict[GpuUuid, Int64] = {}


def read_offer(noted: Mapping[str, str], version: Version | None = Version.V2_10) -> Offer | None:
    """The offer of a Node's annotations; None if there is none or it cannot be decoded.

    `version`: the scheduler that reads it; None: the one for which it was written.
    """
    gpus = decode(noted.get(annotations.REGISTER, ""), version)
    try:
        scores = noted.get(annotations.SCORE, "[]")
        points = msgspec.json.decode(scores, type=tuple[_PairPoints, ...])
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None  # HAMi rejects the whole Node
    if gpus is None:
        return None
    cordoned = {word.strip() for word in noted.get(annotations.CORDON, "").split(",")} - {""}
    return Offer(gpus, frozenset(cordoned), {one.uuid: one.score for one in points})
