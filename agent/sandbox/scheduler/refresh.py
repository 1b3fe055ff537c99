"""When a scheduler reads a register annotation again, and in which form: a rule for each version.

Source: HAMi v2.4.0 to v2.10.0 pkg/scheduler/scheduler.go:register, nvidia/device.go:CheckHealth and
GetNodeDevices, pkg/device/devices.go:CheckHealth.
"""

import datetime as dt
import enum
from dataclasses import dataclass, replace
from typing import Final

from agent.codec.register import RegisteredGpu, decode_register
from agent.codec.register_colon import SHORT, decode_register_colon
from agent.core.cluster import annotations
from agent.core.errors import MalformedText
from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.requests import COUNT, parse_quantity

REQUESTING: Final = "Requesting"
DELETED: Final = "Deleted"
_STALE: Final = dt.timedelta(seconds=60)
_STAMP: Final = "%Y-%m-%d %H:%M:%S"


class Version(enum.Enum):
    """A line of HAMi's schedulers that read a Node in the same way."""

    V2_4 = "2.4"
    V2_7 = "2.5 to 2.7.1"
    V2_8 = "2.8"
    V2_9 = "2.9"
    V2_10 = "2.10"

    @property
    def reads_json(self) -> bool:
        """True from 2.8 on; before, records of fields."""
        return self not in {Version.V2_4, Version.V2_7}

    @property
    def marks_deleted(self) -> bool:
        """True where a node that is dropped gets `Deleted_<now>`; later its handshake is removed.

        These versions do not look at a node at all while its annotation cannot be decoded.
        """
        return self is not Version.V2_10


@dataclass(slots=True)
class NodeSighting:
    """What was last seen of a node; the refresh rule compares with it."""

    allocatable: int = 0
    annotation: str = ""


@dataclass(frozen=True, slots=True)
class Checkup:
    """The refresh rule's answer; `asks` means that `Requesting_<now>` is to be written."""

    healthy: bool
    refresh: bool
    asks: bool = False


def check_node(
    seen: NodeSighting, node: Json, now: dt.datetime, version: Version = Version.V2_10
) -> Checkup:
    """Apply the version's refresh rule to one node; `seen` is brought up to date."""
    noted = node["metadata"].get("annotations") or {}
    handshake = noted.get(annotations.HANDSHAKE, "")
    if not version.reads_json:
        return _check_stamps(handshake, now)
    allocatable = parse_quantity(_allocatable(node)) or 0
    shared = _check_shared(handshake, allocatable, now, version)
    return _check_count(seen, allocatable, noted.get(annotations.REGISTER, ""), shared, version)


def decode(text: str, version: Version) -> tuple[RegisteredGpu, ...] | None:
    """The GPUs that the version reads, or None where it does not.

    Numbers and truth values that old versions guess at are refused: the agent writes none.
    """
    records = [record for record in text.split(":") if record]
    if version is Version.V2_4 and any(record.count(",") + 1 != SHORT for record in records):
        return None
    try:
        gpus = decode_register(text) if version.reads_json else decode_register_colon(text)
    except MalformedText:
        return None
    return tuple(replace(gpu, mode="") for gpu in gpus) if version is Version.V2_4 else gpus


def requesting(now: dt.datetime) -> str:
    """The stamp by which a scheduler asks for a sign of life."""
    return f"{REQUESTING}_{now.strftime(_STAMP)}"


def deleted(now: dt.datetime) -> str:
    """The stamp of a scheduler that has dropped the node."""
    return f"{DELETED}_{now.strftime(_STAMP)}"


def _check_stamps(text: str, now: dt.datetime) -> Checkup:
    """Up to 2.7.1: a node that leaves a request unanswered for a minute is dropped."""
    if REQUESTING in text:
        asked = _time(text)
        return Checkup(healthy=asked is not None and now - asked < _STALE, refresh=False)
    if DELETED in text:
        return Checkup(healthy=True, refresh=False)
    return Checkup(healthy=True, refresh=True, asks=True)


def _check_shared(text: str, allocatable: int, now: dt.datetime, version: Version) -> Checkup:
    """The handshake's rule, which all vendors share; for NVIDIA's GPUs 2.8 does without one."""
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
    """From 2.8 on: how many slices the kubelet offers; from 2.10 on: the text itself, too."""
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


def _allocatable(node: Json) -> object:
    return ((node.get("status") or {}).get("allocatable") or {}).get(COUNT, "")
