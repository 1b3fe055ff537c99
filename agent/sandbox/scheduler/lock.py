"""The node lock: who may take it, and what a failed bind leaves of it.

Source: HAMi v2.10 pkg/util/nodelock/nodelock.go.
"""

import datetime as dt
import enum
from collections.abc import Awaitable, Callable

from agent.codec.nodelock import decode_node_lock
from agent.core.errors import MalformedText


class Claim(enum.Enum):
    """What a pod that wants the lock is to do."""

    TAKE = "write the lock"
    HOLD = "it is ours already"


class LockError(Exception):
    """The lock cannot be had; the text is the scheduler's."""


class ContentionError(LockError):
    """Another living pod holds it."""


async def claim_lock(
    text: str | None,
    owner: tuple[str, str],
    now: dt.datetime,
    valid_for: float,
    is_alive: Callable[[str, str], Awaitable[bool]],
) -> Claim:
    """Decide what pod `owner` (namespace, name) may do about a lock; `valid_for` in seconds.

    `is_alive` says whether the pod of that namespace and name exists; it is asked only where the
    answer decides.

    Raises:
        ContentionError: another living pod took it less than `valid_for` ago.
        LockError: the text is no lock.
    """
    if not text:
        return Claim.TAKE
    try:
        lock = decode_node_lock(text)
    except MalformedText as malformed:
        raise LockError(_go_words(text, malformed)) from malformed
    if (now - lock.stamp).total_seconds() > valid_for:
        return Claim.TAKE
    if not lock.name:
        raise ContentionError
    if (lock.namespace, lock.name) == owner:
        return Claim.HOLD
    if not await is_alive(lock.namespace, lock.name):
        return Claim.TAKE
    raise ContentionError


def is_released_by(text: str | None, owner: tuple[str, str]) -> bool:
    """Whether a roll-back of `owner` removes the lock: its own, and any that names nobody."""
    if not text:
        return False
    return "," not in text or text.endswith(",{},{}".format(*owner))


def _go_words(text: str, malformed: MalformedText) -> str:
    """The text of Go's time.Parse for a stamp that begins with no year; else our own."""
    stamp = text.partition(",")[0]
    if stamp[:4].isdecimal():
        return str(malformed)
    return (
        f'parsing time "{stamp}" as "2006-01-02T15:04:05Z07:00": cannot parse "{stamp}" as "2006"'
    )
