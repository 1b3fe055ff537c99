"""Takes, writes and releases the node lock.

Source: HAMi v2.10 pkg/util/nodelock/nodelock.go (LockNode, SetNodeLock, ReleaseNodeLock). The
number and order of the requests are HAMi's, because each waits in the client's queue.
"""

import asyncio
import datetime as dt
import random
import re
import weakref
from collections.abc import Awaitable, Callable
from typing import Final

from agent.codec.nodelock import encode_node_lock
from agent.core.cluster import annotations
from agent.core.ports import Clock
from agent.kit.backoff import Backoff
from agent.sandbox.api_errors import Json, NotFoundError, StatusError
from agent.sandbox.scheduler.cluster import SchedulerCluster

_TRIES: Final = 5
_PAUSES: Final = (0.1, 0.2, 0.4, 0.8)
_JITTER: Final = 0.5
_STRATEGY: Final = "{Duration:100ms Factor:2 Jitter:0.5 Steps:5 Cap:0s}"
_PARTS: Final = 3
LAYOUT: Final = "2006-01-02T15:04:05Z07:00"
"""How Go writes the form of a lock's time."""
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d([.,]\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)


class LockError(Exception):
    """The lock cannot be taken; the text is the scheduler's."""


class ContentionError(LockError):
    """Another existing pod holds the lock."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}: node lock contention")


class NodeLocks:
    """Takes and releases the locks of nodes for pods; `timeout` in seconds.

    Writes to the lock of one node are serialised; the first read of `take` is not.
    """

    def __init__(
        self, cluster: SchedulerCluster, clock: Clock, rng: random.Random, timeout: float
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._rng = rng
        self._timeout = timeout
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def take(self, node_name: str, pod: Json) -> None:
        """Lock the node for the pod. A lock with the pod's namespace and name counts as its own.

        Raises:
            ContentionError: another existing pod took it less than `timeout` seconds ago.
            LockError: the text is not a lock, or it could not be written.
            StatusError: the API server refuses the read.
        """
        text = _lock_of(await self._node(node_name))
        if text is None:
            await self._set(node_name, pod)
            return
        stamp, namespace, name = parse_lock(text)
        if (self._clock.now() - stamp).total_seconds() <= self._timeout:
            if (namespace, name) == _owner(pod):
                return
            if not (namespace and name) or await self._is_alive(namespace, name):
                span = go_duration(int(self._timeout))
                raise ContentionError(f"node {node_name} has been locked within {span}")
        await self._remove(node_name, pod, whoever=True)
        await self._set(node_name, pod)

    async def release(self, node_name: str, pod: Json) -> None:
        """Remove the pod's lock, or one without an owner; any other stays.

        Raises:
            LockError: it could not be written.
            StatusError: the API server refuses the read.
        """
        await self._remove(node_name, pod, whoever=False)

    async def _set(self, node_name: str, pod: Json) -> None:
        """Write the lock if there is none. Its time is taken before the wait in the queue."""
        owner = _owner(pod)

        async def write() -> None:
            node = await self._node(node_name)
            held = _lock_of(node)
            if held is not None and held.endswith(",{},{}".format(*owner)):
                return
            if held is not None:
                raise ContentionError(f"node {node_name} is locked")
            await self._patch(node, encode_node_lock(self._clock.now(), *owner))

        async with self._turn(node_name):
            if _lock_of(await self._node(node_name)) is not None:
                raise ContentionError(f"node {node_name} is locked")
            await self._insist("set", node_name, write)

    async def _remove(self, node_name: str, pod: Json, *, whoever: bool) -> None:
        """Remove the lock as first read, if it is the pod's, without an owner, or `whoever`."""
        ending = ",{},{}".format(*_owner(pod))
        async with self._turn(node_name):
            first = _lock_of(await self._node(node_name))
            if first is None or not (whoever or "," not in first or first.endswith(ending)):
                return

            async def write() -> None:
                node = await self._node(node_name)
                held = _lock_of(node)
                if held is None:
                    return
                by_text = whoever or "," not in held
                if (held == first) if by_text else held.endswith(ending):
                    await self._patch(node, None)

            await self._insist("release", node_name, write)

    async def _insist(
        self, verb: str, node_name: str, write: Callable[[], Awaitable[None]]
    ) -> None:
        """Try a refused write up to five times in all. ContentionError ends it at once."""
        pauses = Backoff(_PAUSES, _JITTER, self._rng)
        said = f"failed to {verb} node lock (node={node_name}, retry strategy={_STRATEGY})"
        for tries_left in reversed(range(_TRIES)):
            try:
                await write()
            except ContentionError as taken:
                raise ContentionError(
                    f"{said}: {str(taken).removesuffix(': node lock contention')}"
                ) from taken
            except StatusError as refusal:
                if not tries_left:
                    raise LockError(f"{said}: {refusal}") from refusal
                await asyncio.sleep(pauses.next())
            else:
                return

    def _turn(self, node_name: str) -> asyncio.Lock:
        return self._turns.setdefault(node_name, asyncio.Lock())

    async def _node(self, node_name: str) -> Json:
        return await self._cluster.get("nodes", "", node_name)

    async def _patch(self, node: Json, text: str | None) -> None:
        metadata = node["metadata"]
        patch = {"metadata": {"annotations": {annotations.MUTEX_LOCK: text}}}
        version = metadata["resourceVersion"]
        await self._cluster.patch("nodes", "", metadata["name"], patch, version=version)

    async def _is_alive(self, namespace: str, name: str) -> bool:
        try:
            await self._cluster.get("pods", namespace, name)
        except NotFoundError:
            return False
        return True


def go_duration(seconds: int) -> str:
    """A duration as Go prints it, such as `5m0s`."""
    hours, rest = divmod(seconds, 3600)
    minutes, last = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes}m{last}s"
    return f"{minutes}m{last}s" if minutes else f"{last}s"


def parse_lock(text: str) -> tuple[dt.datetime, str, str]:
    """Parse a lock into time, namespace and name. The number of parts is checked first.

    Raises:
        LockError: the text is not a lock.
    """
    parts = text.split(",")
    if len(parts) not in (1, _PARTS):
        raise LockError(
            f"malformed lock annotation: expected 3 parts, got {len(parts)} from {text}"
        )
    try:
        if not _TIME.fullmatch(parts[0]):
            # Go names the first part that is wrong; this one is right for a text without a year.
            wrong = f'cannot parse "{parts[0]}" as "2006"'
            raise LockError(f'parsing time "{parts[0]}" as "{LAYOUT}": {wrong}')
        stamp = dt.datetime.fromisoformat(parts[0])
    except ValueError as bad:
        raise LockError(f'parsing time "{parts[0]}": {bad}') from bad
    return (stamp, parts[1], parts[2]) if len(parts) == _PARTS else (stamp, "", "")


def _lock_of(node: Json) -> str | None:
    text: str | None = (node["metadata"].get("annotations") or {}).get(annotations.MUTEX_LOCK)
    return text


def _owner(pod: Json) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]
