"""The registered nodes and their GPUs: how and when each scheduler version reads an annotation.

Source: HAMi v2.7.1 to v2.10.0 pkg/scheduler/scheduler.go:register, nvidia/device.go:CheckHealth and
GetNodeDevices, pkg/device/devices.go:CheckHealth.
"""

import contextlib
import datetime as dt
import enum
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeVar

import msgspec

from agent import cluster as annotations
from agent.cluster import TEXT_LIMIT
from agent.errors import MalformedText, cap
from agent.hami.annotations import (
    WHAT,
    Int32,
    Int64,
    RegisteredGpu,
    decode_register_colon,
    is_json_form,
)
from agent.model import GpuUuid, Scores
from agent.sandbox.scheduler.model import (
    COUNT,
    GpuView,
    Links,
    Load,
    RegisteredNode,
    parse_quantity,
)
from agent.sandbox.store import Json

# JSON annotations of a Node as HAMi's scheduler reads them: by the rules of Go's encoding/json.
#
# Keys match in any case; the last of equal keys wins; null sets nothing; an integer has no fraction
# and no exponent. Refused, although Go takes it and no program writes it: a repeated key whose
# values are lists, objects or of two types, and null in place of a MIG profile.
# Source: HAMi v2.10 pkg/device/devices.go, UnMarshalNodeDevices and DecodePairScores.

_SCORE: Final = "score annotation"
_T = TypeVar("_T")
_PLACE: Final = re.compile(r"\$\[(\d+)\]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


_Uint32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class _Placement(msgspec.Struct, frozen=True):
    start: _Uint32 = 0
    size: _Uint32 = 0


class _MigProfile(msgspec.Struct, frozen=True):
    name: str = ""
    memoryMB: Int32 = 0  # noqa: N815 -- HAMi's name
    core: Int32 = 0
    sliceCount: _Uint32 = 0  # noqa: N815
    placements: tuple[_Placement, ...] = ()


class _MigTemplate(msgspec.Struct, frozen=True):
    name: str = ""
    core: Int32 = 0
    memory: Int32 = 0
    count: Int32 = 0


class _PairPoints(msgspec.Struct, frozen=True):
    uuid: GpuUuid = GpuUuid("")
    score: dict[GpuUuid, Int64] = {}


class _UnreadOfGpu(msgspec.Struct, frozen=True):
    """Fields of HAMi's struct that the agent does not use; 2.10 does not decode the last one."""

    migProfiles: tuple[_MigProfile, ...] = ()  # noqa: N815 -- HAMi's name
    migtemplate: tuple[tuple[_MigTemplate | None, ...] | None, ...] = ()
    devicevendor: str = ""
    custominfo: dict[str, Any] = {}
    devicepairscore: _PairPoints | None = None


def _fold(key: str) -> str:
    """Fold the case of a key as Go does; the long s is the only special letter."""
    return key.lower().replace("\u017f", "s")


_NAMES: Final = {
    _fold(field.encode_name): field.encode_name
    for struct in (RegisteredGpu, _MigProfile, _Placement, _MigTemplate, _PairPoints, _UnreadOfGpu)
    for field in msgspec.structs.fields(struct)
}
"""The names of all fields by their folded form."""


def decode_register(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode the GPUs in the text's order; keys that no version of HAMi has are ignored.

    Fields that a scheduler's decoder checks but does not use are checked too: one wrong type loses
    the whole node. Unlike HAMi, an error returns no GPU at all.

    Raises:
        MalformedText: not a JSON array of objects, a value of another type or range, or no GPU.
    """
    gpus: tuple[RegisteredGpu, ...] = ()
    if text != "null":
        _decode(text, _UnreadOfGpu, WHAT)
        gpus = _decode(text, RegisteredGpu, WHAT)
    if not gpus:
        raise MalformedText(f"{WHAT} names no GPU")
    return gpus


def decode_either(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode a register annotation of either form. Raises MalformedText."""
    return decode_register(text) if is_json_form(text) else decode_register_colon(text)


def decode_scores(text: str) -> Scores:
    """Decode the scores; unknown keys are ignored.

    Raises:
        MalformedText: not a JSON array of GPUs with whole points. A scheduler then rejects the
            whole node.
    """
    return {pair.uuid: pair.score for pair in _decode(text, _PairPoints, _SCORE)}


def _decode(text: str, kind: type[_T], what: str) -> tuple[_T, ...]:
    """One value for each GPU. Raises MalformedText, whose text begins with `what`."""
    if len(text) > TEXT_LIMIT:
        raise MalformedText(f"{what} is over {TEXT_LIMIT} characters")
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_float=_number, parse_constant=_number
        )
        return msgspec.convert(value, tuple[kind, ...])  # type: ignore[valid-type]
    except RecursionError as error:
        raise MalformedText(f"{what} is not JSON of HAMi's: nested too deep") from error
    except msgspec.ValidationError as error:
        said = _PLACE.sub(r"GPU \1", str(error))
        raise MalformedText(f"{what} cannot be read: {cap(said)}") from error
    except ValueError as error:
        raise MalformedText(f"{what} is not JSON: {cap(str(error))}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in pairs:
        name = _NAMES.get(_fold(key), key)
        if item is None:
            continue
        before = found.get(name, item)
        if type(before) is not type(item) or (name in found and isinstance(item, list | dict)):
            raise ValueError(f"{cap(name)} stands there twice")
        found[name] = _SURROGATE.sub("\ufffd", item) if isinstance(item, str) else item
    return found


def _number(text: str) -> float:
    """Raises ValueError for what is no number of JSON, and for what no float64 holds."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{cap(text)} is not a JSON value")
    return value


# The registered nodes, and when each version reads an annotation.

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
    handshake = noted.get(annotations.HANDSHAKE, "")
    if not version.reads_json:
        return _check_stamps(handshake, now)
    offered = ((node.get("status") or {}).get("allocatable") or {}).get(COUNT, "")
    allocatable = parse_quantity(offered) or 0
    shared = _check_shared(handshake, allocatable, now, version)
    return _check_count(seen, allocatable, noted.get(annotations.REGISTER, ""), shared, version)


def decode(text: str, version: Version | None) -> tuple[RegisteredGpu, ...] | None:
    """The GPUs that the version reads, or None if it cannot; `version` None: one that reads it.

    Numbers and booleans that old versions guess are refused, because the agent writes none.
    """
    if version is not None and version.reads_json != is_json_form(text):
        return None
    try:
        return decode_either(text)
    except MalformedText:
        return None


def requesting(now: dt.datetime) -> str:
    """The stamp by which a scheduler requests a new stamp of the node."""
    return f"{REQUESTING}_{now.strftime(_STAMP)}"


def deleted(now: dt.datetime) -> str:
    """The stamp of a scheduler that has dropped the node."""
    return f"{DELETED}_{now.strftime(_STAMP)}"


def _check_stamps(text: str, now: dt.datetime) -> Checkup:
    """Up to and including 2.7.1: drop a node that leaves a request unanswered for 60 s."""
    if REQUESTING in text:
        asked = _time(text)
        return Checkup(healthy=asked is not None and now - asked < _STALE, refresh=False)
    if DELETED in text:
        return Checkup(healthy=True, refresh=False)
    return Checkup(healthy=True, refresh=True, asks=True)


def _check_shared(text: str, allocatable: int, now: dt.datetime, version: Version) -> Checkup:
    """The handshake rule that all vendors share. 2.8 has none for NVIDIA's GPUs."""
    if version is Version.V2_8:
        return Checkup(healthy=True, refresh=False)
    stamp = _time(text)
    if REQUESTING in text:
        lives = stamp is None or now - stamp < _STALE or allocatable > 0
        return Checkup(healthy=lives, refresh=False)
    if version is Version.V2_9 and DELETED in text and (stamp is None or now - stamp < _STALE):
        return Checkup(healthy=True, refresh=False)
    return Checkup(healthy=True, refresh=True, asks=True)


def _check_count(
    seen: NodeSighting, allocatable: int, text: str, shared: Checkup, version: Version
) -> Checkup:
    """From 2.8 on: compare the slices that the kubelet offers; from 2.10 on: also the text."""
    before = seen.allocatable
    if allocatable == before == 0:
        return shared
    is_new = version is Version.V2_10 and text != seen.annotation
    seen.allocatable, seen.annotation = allocatable, text
    if allocatable == 0:
        return Checkup(healthy=False, refresh=shared.refresh, asks=shared.asks)
    if allocatable != before:
        return Checkup(healthy=True, refresh=True, asks=shared.asks)
    return Checkup(shared.healthy, shared.refresh or is_new, shared.asks)


def _time(text: str) -> dt.datetime | None:
    _, _, stamp = text.partition("_")
    try:
        return dt.datetime.strptime(stamp, _STAMP).replace(tzinfo=dt.UTC)
    except ValueError:
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


def read_offer(noted: Mapping[str, str], version: Version | None = Version.V2_10) -> Offer | None:
    """The offer of a Node's annotations; None if there is none or it cannot be decoded.

    `version`: the scheduler that reads it; None: the one for which it was written.
    """
    gpus, links = decode(noted.get(annotations.REGISTER, ""), version), noted.get(annotations.SCORE)
    try:
        points = {} if links is None else decode_scores(links)
    except MalformedText:
        return None
    if gpus is None:
        return None
    words = noted.get(annotations.CORDON, "").split(",")
    return Offer(gpus, frozenset(word.strip() for word in words) - {""}, points)
