"""The node lock annotation of HAMi's scheduler: `<RFC 3339>,<namespace>,<pod>`.

Source: HAMi v2.10 pkg/util/nodelock/nodelock.go, ParseNodeLock and SetNodeLock.
"""

import datetime as dt
import re

from agent.core.cluster.annotations import MUTEX_LOCK
from agent.core.cluster.pods import NodeLock, NodeView
from agent.core.errors import MalformedText, cap

_STAMP = re.compile(
    r"(?P<seconds>[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.(?P<fraction>[0-9]+))?"
    r"(?:Z|(?P<sign>[+-])(?P<hours>[01][0-9]|2[0-4]):(?P<minutes>[0-5][0-9]))"
)


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
    match = _STAMP.fullmatch(text)
    if match is None:
        raise MalformedText(f"{cap(text)!r} is not an RFC 3339 time such as 2026-08-21T10:00:00Z")
    micros = int((match["fraction"] or "")[:6].ljust(6, "0"))
    offset = dt.timedelta(hours=int(match["hours"] or 0), minutes=int(match["minutes"] or 0))
    try:
        local = dt.datetime.fromisoformat(match["seconds"])
        utc = local + offset if match["sign"] == "-" else local - offset
    except (ValueError, OverflowError) as error:
        raise MalformedText(f"{cap(text)!r} is not an RFC 3339 time: {error}") from error
    return utc.replace(microsecond=micros, tzinfo=dt.UTC)


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
