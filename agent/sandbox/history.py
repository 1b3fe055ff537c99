"""The bounded history of writes, and the cursors with which watches read it.

A subscriber has only a cursor, so a slow one costs no memory. It gets `GoneError` once the history
no longer has its position.
"""

import asyncio
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from agent.sandbox.api_errors import BadRequestError, GoneError, Json

_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "nodes": frozenset({"metadata.name"}),
    "namespaces": frozenset({"metadata.name", "status.phase"}),
    "pods": frozenset(
        {
            "metadata.name",
            "metadata.namespace",
            "spec.nodeName",
            "spec.schedulerName",
            "status.phase",
        }
    ),
    "events": frozenset(
        {
            "involvedObject.kind",
            "involvedObject.name",
            "involvedObject.namespace",
            "involvedObject.uid",
            "metadata.name",
            "metadata.namespace",
            "reason",
            "type",
        }
    ),
}
"""The selectable fields of each resource. The real server has a few more for pods and events."""


UNLIKE: Final = "!="
"""In a selector, separates a field from a value that it must not have."""


class Change(NamedTuple):
    """One event of a watch: `type` is ADDED, MODIFIED or DELETED."""

    type: str
    object: Json
    resource_version: int


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """One write, with the object before and after it."""

    version: int
    before: Json | None
    after: Json | None


def check_fields(resource: str, fields: Iterable[str]) -> None:
    """Check the names in a field selector.

    Raises:
        BadRequestError: the resource cannot be selected by a field.
    """
    for field in fields:
        label = field.partition(UNLIKE)[0]
        if label not in _FIELDS[resource]:
            raise BadRequestError(f"field label not supported: {label}")


def matches(stored: Json, namespace: str | None, fields: Mapping[str, str]) -> bool:
    """Whether an object is in the namespace and matches a checked field selector."""
    if namespace is not None and stored["metadata"].get("namespace") != namespace:
        return False
    return all(_passes(stored, field, wanted) for field, wanted in fields.items())


def _passes(stored: Json, field: str, wanted: str) -> bool:
    label, unlike, value = field.partition(UNLIKE)
    return _value(stored, label) != value if unlike else _value(stored, label) == wanted


def _value(stored: Json, label: str) -> object:
    part, _, key = label.partition(".")
    held = stored.get(part)
    if key:
        held = (held or {}).get(key)
    return "" if held is None else held


@dataclass(frozen=True, slots=True)
class Selection:
    """The objects of one watch: by resource, namespace (None: all) and field selector."""

    resource: str
    namespace: str | None
    fields: Mapping[str, str]

    def see(self, record: WriteRecord) -> Change | None:
        """The event of one write for the watcher. Entering the selection is ADDED.

        DELETED has the object as it last matched, with the version of the write that ended this
        (apiserver/pkg/storage/cacher/cache_watcher.go:convertToWatchEvent).
        """
        before, after = self._admit(record.before), self._admit(record.after)
        if after is not None:
            return Change("ADDED" if before is None else "MODIFIED", after, record.version)
        if before is None:
            return None
        told = before | {"metadata": before["metadata"] | {"resourceVersion": str(record.version)}}
        return Change("DELETED", told, record.version)

    def _admit(self, stored: Json | None) -> Json | None:
        if stored is None or not matches(stored, self.namespace, self.fields):
            return None
        return stored


class History:
    """The latest writes, at most `limit` of each resource, and the version counter."""

    def __init__(self, resources: Iterable[str], limit: int) -> None:
        self.version = 1
        self._limit = limit
        self._records: dict[str, list[WriteRecord]] = {resource: [] for resource in resources}
        self._forgotten = dict.fromkeys(self._records, 0)
        self._followers: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._changed = asyncio.Event()

    def append(self, resource: str, before: Json | None, after: Json | None) -> None:
        """Record a write under the next version, and wake all followers."""
        self.version += 1
        records = self._records[resource]
        records.append(WriteRecord(self.version, before, after))
        if len(records) > self._limit:
            self._forgotten[resource] = records[-self._limit - 1].version
            del records[: -self._limit]
        self._changed.set()
        self._changed = asyncio.Event()

    def forget(self) -> None:
        """Drop all writes. Followers that are up to date continue; others get GoneError."""
        before = self.version
        self.version += 1
        for resource, records in self._records.items():
            records.clear()
            self._forgotten[resource] = self.version
        for follower in self._followers:
            if follower.cursor >= before:
                follower.cursor = self.version

    def after(self, resource: str, since: int) -> Sequence[WriteRecord]:
        """The writes after a version.

        Raises:
            GoneError: the history no longer has some of them.
        """
        if since < self._forgotten[resource]:
            oldest = self._forgotten[resource]
            raise GoneError(f"too old resource version: {since} ({oldest})")
        records = self._records[resource]
        return records[bisect_right(records, since, key=lambda record: record.version) :]

    def follow(
        self, selection: Selection, since: int | None, found: Iterable[Json]
    ) -> "Subscription":
        """Start a cursor at the version `since`, or (None) now, with the given objects.

        Raises:
            GoneError: `since` is older than the history.
        """
        if since is None:
            follower = Subscription(self, selection, self.version, found)
        else:
            self.after(selection.resource, since)
            follower = Subscription(self, selection, since, ())
        self._followers.add(follower)
        return follower

    async def wait(self) -> None:
        """Return after the next write."""
        await self._changed.wait()


class Subscription:
    """An endless iterator over the changes of one selection. Cancelling `anext` loses no change."""

    def __init__(
        self, history: History, selection: Selection, cursor: int, found: Iterable[Json]
    ) -> None:
        self._history = history
        self._selection = selection
        self._found = list(found)[::-1]
        self.cursor = cursor

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while True:
            change = self.take()
            if change is not None:
                return change
            await self._history.wait()

    @property
    def is_started(self) -> bool:
        """True once all initial objects were taken."""
        return not self._found

    def take(self) -> Change | None:
        """The next change, or None if there is none yet.

        Raises:
            GoneError: the history no longer has this subscriber's position.
        """
        if self._found:
            first = self._found.pop()
            return Change("ADDED", first, int(first["metadata"]["resourceVersion"]))
        for record in self._history.after(self._selection.resource, self.cursor):
            self.cursor = record.version
            change = self._selection.see(record)
            if change is not None:
                return change
        self.cursor = max(self.cursor, self._history.version)
        return None
