"""The annotations with which HAMi's scheduler places a pod, and its lock on the Node."""

import contextlib
import datetime as dt
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from agent.cluster import (
    MUTEX_LOCK,
    PHASE_ALLOCATING,
    PHASE_FAILED,
    PHASE_SUCCESS,
    NodeLock,
    NodeView,
)
from agent.errors import MalformedText, cap
from agent.hami.register import INT32, HandshakeWord, parse_int
from agent.model import GpuUuid, Share

# The node lock annotation of HAMi's scheduler: `<RFC 3339>,<namespace>,<pod>`.
#
# Source: HAMi v2.10 pkg/util/nodelock/nodelock.go, ParseNodeLock and SetNodeLock.

_STAMP = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?"
    r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
"""The form alone: Python reads more forms than this one."""


def decode_node_lock(text: str) -> NodeLock:
    """Decode a lock; its `value` is `text` itself.

    The legacy form, a stamp alone or with `,,` after it, names no owner.

    Raises:
        MalformedText: the stamp is not an RFC 3339 time, or there are not exactly 1 or 3 parts.
    """
    parts = text.split(",")
    if len(parts) not in {1, 3}:
        raise MalformedText(
            f"node lock {cap(text)!r} has {len(parts)} parts; "
            "expected a time, or a time, a namespace and a pod"
        )
    stamp, namespace, name = parts if len(parts) == 3 else (text, "", "")
    return NodeLock(value=text, stamp=decode_stamp(stamp), namespace=namespace, name=name)


def encode_node_lock(stamp: dt.datetime, namespace: str, name: str) -> str:
    """Encode a lock as the scheduler does, in whole seconds of UTC."""
    return f"{encode_stamp(stamp)},{namespace},{name}"


def encode_stamp(stamp: dt.datetime) -> str:
    """Format an aware time as RFC 3339, in whole seconds of UTC."""
    utc = stamp.astimezone(dt.UTC).replace(microsecond=0, tzinfo=None)
    return f"{utc.isoformat()}Z"


def decode_stamp(text: str) -> dt.datetime:
    """Parse an RFC 3339 time into an aware one in UTC, truncated to 1 µs.

    Raises:
        MalformedText: `text` is not such a time.
    """
    try:
        if _STAMP.fullmatch(text):
            return dt.datetime.fromisoformat(text).astimezone(dt.UTC)
    except (ValueError, OverflowError) as error:
        raise MalformedText(f"{cap(text)!r} is not an RFC 3339 time: {error}") from error
    raise MalformedText(f"{cap(text)!r} is not an RFC 3339 time such as 2026-08-21T10:00:00Z")


def held_lock(node: NodeView | None) -> NodeLock | None:
    """The lock on the Node; None when it is absent or unreadable.

    An unreadable lock proves no pod's right. HAMi's scheduler binds no pod to the node until it is
    removed.
    """
    return _lock(node.annotations.get(MUTEX_LOCK)) if node else None


def former_locks(node: NodeView | None, elapsed: float) -> tuple[NodeLock, ...]:
    """The former locks that still prove a right, the last first. `elapsed` is the loop time."""
    texts = (text for text, until in (node.former_locks if node else ()) if until > elapsed)
    return tuple(lock for text in texts if (lock := _lock(text)) is not None)


def _lock(text: str | None) -> NodeLock | None:
    try:
        return decode_node_lock(text) if text is not None else None
    except MalformedText:
        return None


# The devices annotation of a pod: groups of shares, one group for each container.
#
# pod = { group ";" } group = { device ":" } device = UUID "," type "," MiB "," percent
#
# Source: HAMi v2.10 pkg/device/devices.go, DecodePodDevices and EncodePodSingleDevice.

TYPE_WORD = "NVIDIA"
LENGTH_LIMIT = 64 * 1024
"""Characters: 1,000 shares. A tenant may write four times as many, and every change of the pod
decodes them again."""
GROUP_LIMIT = 256
"""Groups: the kubelet allocates a pod's containers one by one and admits no other pod meanwhile."""

Groups = tuple[tuple[Share, ...], ...]

_PLACEHOLDER = ["", "", "0", "0"]


def decode_pod_devices(text: str, *, is_served: bool = False) -> Groups:
    """Decode groups of shares in the order of the text; an empty group: a container without GPUs.

    A text that ends in `;`, as HAMi writes it, has an empty last group. The placeholder `,,0,0`,
    which schedulers 2.4 and 2.5 write for a container without GPUs, is skipped; other devices
    without a UUID stay. HAMi accepts any type and negative numbers. `is_served`: the pod gets its
    GPUs from this agent, and both are refused.

    Raises:
        MalformedText: fewer than four fields, a number outside int32, or more than LENGTH_LIMIT
            characters or GROUP_LIMIT groups.
    """
    if len(text) > LENGTH_LIMIT or text.count(";") > GROUP_LIMIT:
        raise MalformedText(
            f"devices text has {len(text)} characters and {text.count(';')} groups; "
            f"at most {LENGTH_LIMIT} and {GROUP_LIMIT} are read"
        )
    return tuple(
        tuple(_decode_share(piece, place, is_served=is_served) for piece in _pieces(part))
        for place, part in enumerate(text.split(";"))
    )


def vendor_words(text: str) -> tuple[tuple[str, ...], ...]:
    """The type of each share of a text that `decode_pod_devices` accepts, in the same shape."""
    return tuple(tuple(piece.split(",")[1] for piece in _pieces(part)) for part in text.split(";"))


def consume(text: str, groups: Collection[int]) -> str:
    """Empty the groups at those positions of `text`; the rest, with all separators, stays.

    Repeating it changes nothing more, and neither does a position beyond the text.
    """
    return ";".join("" if place in groups else part for place, part in enumerate(text.split(";")))


def _pieces(text: str) -> Iterator[str]:
    """The devices of a group; as in HAMi, pieces without a comma are skipped."""
    pieces = (piece for piece in text.split(":") if "," in piece)
    return (piece for piece in pieces if piece.split(",")[:4] != _PLACEHOLDER)


def _decode_share(text: str, place: int, *, is_served: bool) -> Share:
    """Decode one device; fields after the fourth are ignored."""
    where, fields = f"devices text, group {place}", text.split(",")
    if len(fields) < 4:
        raise MalformedText(
            f"{where}: {cap(text)!r} has {len(fields)} of 4 fields (UUID, type, MiB, percent)"
        )
    uuid, kind, memory, cores = fields[:4]
    if is_served and kind != TYPE_WORD:
        raise MalformedText(
            f"{where}: {cap(uuid, 64)} is of type {cap(kind, 64)!r}; only type {TYPE_WORD} is "
            "served here"
        )
    mib, percent = _number(memory, f"{where}: memory"), _number(cores, f"{where}: cores")
    if is_served and min(mib, percent) < 0:
        raise MalformedText(
            f"{where}: GPU {cap(uuid)} has {mib} MiB and {percent} percent; neither may be negative"
        )
    return Share(uuid=GpuUuid(uuid), memory_mib=mib, core_percent=percent)


def _number(text: str, where: str) -> int:
    value = parse_int(text, INT32)
    if value is None:
        raise MalformedText(f"{where} {cap(text)!r} is not a decimal of 32 bits")
    return value


# Recognises by its form alone which of HAMi's annotations a value belongs to.
#
# A text may have a form and still be malformed: the decoder of that form then says where.

PHASES: Final = (PHASE_ALLOCATING, PHASE_SUCCESS, PHASE_FAILED)
MIG_KEY: Final = "containerindex"
"""A key of `hami.io/vgpu-mig-allocations`, which is JSON."""

_KEYED: Final = re.compile(r"[\"']?hami\.io/[A-Za-z0-9._-]+[\"']?\s*[:=]\s*(.*?),?", re.DOTALL)
_LOCK: Final = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}T")
_SECONDS: Final = re.compile("[0-9]{10,11}")
"""Unix seconds from 2001 on."""
_UUID: Final = re.compile(r"\s*(GPU|MIG)-[^,:;\s]+\s*")


def bare(text: str) -> str:
    """Strip the key and the quotes from a value that was copied from kubectl's output.

    No value of HAMi's begins with a quote or a key.
    """
    match = _KEYED.fullmatch(text.strip())
    value = (match[1] if match else text).strip()
    if len(value) < 2 or value[0] != value[-1] or value[0] not in "'\"":
        return value

    inner = value[1:-1]
    if value[0] == '"':
        with contextlib.suppress(ValueError):
            inner = str(json.loads(value))
    return inner.strip()


def kind_of(text: str) -> str | None:
    """The kind of a value by its form, well-formed or not; None: it has no form of HAMi's."""
    return next((kind for kind, has_form in _FORMS.items() if has_form(text)), None)


def keys_of_first(text: str) -> frozenset[str]:
    """The keys of the first object of a JSON array, in lower case; none for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return frozenset()
    first = value[0] if isinstance(value, list) and value else None
    return frozenset(map(str.lower, first)) if isinstance(first, dict) else frozenset()


def _is_register(text: str) -> bool:
    """A JSON array, or a first record with more than four fields and a number as its second."""
    if text.startswith("[") or text == "null":
        return True
    fields = text.lstrip(":").split(":")[0].split(",")
    return ";" not in text and len(fields) > 4 and not fields[1].isalpha()


def _is_cordon(text: str) -> bool:
    uuids = [part for part in text.split(",") if part.strip()]
    return bool(uuids) and all(map(_UUID.fullmatch, uuids))


def _is_devices(text: str) -> bool:
    """A share of four fields, a shorter one before `;`, or only separators (consumed groups)."""
    pieces = [piece for piece in re.split("[:;]", text) if piece]
    fields = max((piece.count(",") for piece in pieces), default=0) + 1
    return fields >= 4 or (";" in text and (fields > 1 or not pieces))


_FORMS: Mapping[str, Callable[[str], bool]] = {
    "nodeconfig": lambda text: text.startswith("{") and '"nodeconfig"' in text.lower(),
    "handshake": lambda text: text.startswith(tuple(word.value for word in HandshakeWord)),
    "lock": lambda text: _LOCK.match(text) is not None,
    "time": lambda text: _SECONDS.fullmatch(text) is not None,
    "phase": lambda text: text in PHASES,
    "score": lambda text: text.startswith("[") and "score" in keys_of_first(text),
    "cordon": _is_cordon,
    "register": _is_register,
    "devices": _is_devices,
}
