"""The API server's memory and refusals: JSON objects with versions and graceful deletion.

- All resources share one version counter.
- A stored object is never changed in place, so readers may keep it.
- A write without a change does not count.
- A deleted pod is marked first, so watchers get two events.
- The history of writes is bounded. A watch has only a cursor in it, so a slow one costs no memory.
  It gets `GoneError` once the history no longer has its position.
"""

import asyncio
import random
import uuid
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, NamedTuple, Self

from typing_extensions import override

from agent.ports import Clock

# The API server's refusals: one class for each reason of a Status object.

Json = dict[str, Any]
"""A plain JSON object, as stored and as sent."""


class StatusError(Exception):
    """A refusal of the API server; `message` is the text of the Status object."""

    code: ClassVar[int] = 500
    reason: ClassVar[str] = "InternalError"

    @override
    def __init_subclass__(cls, *, code: int, reason: str) -> None:
        super().__init_subclass__()
        cls.code, cls.reason = code, reason

    def __init__(self, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.headers = dict(headers or {})

    def status(self) -> Json:
        """The `Status` object that a client of the real server receives, without its details."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }


class BadRequestError(StatusError, code=400, reason="BadRequest"):
    """The request cannot be understood."""


class UnauthorizedError(StatusError, code=401, reason="Unauthorized"):
    """No token, or an unknown one."""


class ForbiddenError(StatusError, code=403, reason="Forbidden"):
    """A known user without the permission."""


class NotFoundError(StatusError, code=404, reason="NotFound"):
    """No such object, or no such path."""


class AlreadyExistsError(StatusError, code=409, reason="AlreadyExists"):
    """An object of this name already exists."""


class ConflictError(StatusError, code=409, reason="Conflict"):
    """A precondition (UID or resource version) does not hold."""


class GoneError(StatusError, code=410, reason="Expired"):
    """The history no longer has the version that the request names."""


class InvalidError(StatusError, code=422, reason="Invalid"):
    """The result would not be a valid object."""


class TooManyRequestsError(StatusError, code=429, reason="TooManyRequests"):
    """The server asks the client to try again later."""


# The objects.

KINDS: Final[Mapping[str, str]] = {
    "nodes": "Node",
    "pods": "Pod",
    "events": "Event",
    "resourcequotas": "ResourceQuota",
    "namespaces": "Namespace",
}
CLUSTER_SCOPED: Final = frozenset({"nodes", "namespaces"})
DEFAULT_GRACE: Final = 30
_STAMP: Final = "%Y-%m-%dT%H:%M:%SZ"
_NAME_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
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
    for field, wanted in fields.items():
        label, unlike, unwanted = field.partition(UNLIKE)
        part, _, key = label.partition(".")
        value = (stored.get(part) or {}).get(key) if key else stored.get(part)
        if ((value or "") != wanted) if not unlike else ((value or "") == unwanted):
            return False
    return True


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


class ObjectStore:
    """Nodes, pods, events, quotas and namespaces of one cluster; synchronous, for one event loop.

    The store returns its own objects: read them, never change them.
    """

    def __init__(self, clock: Clock, rng: random.Random, history: int = 1000) -> None:
        self._clock = clock
        self._rng = rng
        self._objects: dict[str, dict[tuple[str, str], Json]] = {kind: {} for kind in KINDS}
        self._history = History(KINDS, history)

    @property
    def version(self) -> int:
        """The resource version of the latest write."""
        return self._history.version

    def get(self, resource: str, namespace: str, name: str) -> Json:
        """The object of that name (`namespace` is ignored for CLUSTER_SCOPED).

        Raises:
            NotFoundError: there is none.
        """
        found = self._objects[resource].get(_key(resource, namespace, name))
        if found is None:
            raise NotFoundError(f'{resource} "{name}" not found')
        return found

    def select(
        self,
        resource: str,
        *,
        namespace: str | None = None,
        fields: Mapping[str, str] | None = None,
        at: int | None = None,
    ) -> list[Json]:
        """All objects that match, by namespace and name; with `at`, as of that version.

        Raises:
            BadRequestError: the real server does not select by a field.
            GoneError: `at` is older than the history.
        """
        check_fields(resource, fields or {})
        objects = self._objects[resource]
        if at is not None:
            objects = self._snapshot(resource, at)
        present = (objects[key] for key in sorted(objects))
        return [found for found in present if matches(found, namespace, fields or {})]

    def create(self, resource: str, obj: Json) -> Json:
        """Store a new object with a UID, a creation time and a version.

        Raises:
            AlreadyExistsError: an object of this name exists.
            InvalidError: it has neither a name nor a generateName.
        """
        fresh = deepcopy(obj)
        metadata = fresh.setdefault("metadata", {})
        if not metadata.get("name") and metadata.get("generateName"):
            letters = self._rng.choices(_NAME_LETTERS, k=5)
            metadata["name"] = metadata["generateName"] + "".join(letters)
        if not metadata.get("name"):
            missing = "metadata.name: Required value: name or generateName is required"
            raise InvalidError(f'{KINDS[resource]} "" is invalid: {missing}')
        if resource in CLUSTER_SCOPED:
            metadata.pop("namespace", None)
        else:
            metadata.setdefault("namespace", "default")
        key = _key(resource, metadata.get("namespace", ""), metadata["name"])
        if key in self._objects[resource]:
            raise AlreadyExistsError(f'{resource} "{metadata["name"]}" already exists')
        fresh.setdefault("kind", KINDS[resource])
        fresh.setdefault("apiVersion", "v1")
        metadata["uid"] = str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
        metadata["creationTimestamp"] = self._stamp()
        if resource == "pods":
            fresh.setdefault("status", {}).setdefault("phase", "Pending")
        return self._write(resource, key, fresh)

    def update(
        self,
        resource: str,
        namespace: str,
        name: str,
        change: Callable[[Json], Json],
        *,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> Json:
        """Replace an object by the result of `change` on a copy. Without a difference, no write.

        Raises:
            NotFoundError: there is none.
            ConflictError: it has another UID, or another version than the caller knew.
        """
        current = self.get(resource, namespace, name)
        _require(resource, current, uid, resource_version)
        fresh = change(deepcopy(current))
        for fixed in ("name", "namespace", "uid", "creationTimestamp", "resourceVersion"):
            if fixed in current["metadata"]:
                fresh["metadata"][fixed] = current["metadata"][fixed]
        if fresh == current:
            return current
        return self._write(resource, _key(resource, namespace, name), fresh)

    def bind(
        self,
        namespace: str,
        name: str,
        node_name: str,
        *,
        uid: str | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> Json:
        """Assign a pod to a node, as the binding subresource does. A binding can add annotations.

        Raises:
            NotFoundError: no such pod.
            ConflictError: another pod of that name, one being deleted, or one that has a node.
        """

        def assign(pod: Json) -> Json:
            taken = pod["spec"].get("nodeName")
            refused = f'Operation cannot be fulfilled on pods/binding "{name}": pod {name} is '
            if pod["metadata"].get("deletionTimestamp"):
                raise ConflictError(refused + "being deleted, cannot be assigned to a host")
            if taken:
                raise ConflictError(refused + f'already assigned to node "{taken}"')
            pod["spec"]["nodeName"] = node_name
            if annotations:
                pod["metadata"].setdefault("annotations", {}).update(annotations)
            scheduled = {"type": "PodScheduled", "status": "True"}
            conditions = pod["status"].get("conditions") or []
            others = [entry for entry in conditions if entry["type"] != "PodScheduled"]
            pod["status"]["conditions"] = [
                *others,
                scheduled | {"lastTransitionTime": self._stamp()},
            ]
            return pod

        return self.update("pods", namespace, name, assign, uid=uid)

    def delete(
        self,
        resource: str,
        namespace: str,
        name: str,
        *,
        grace: int | None = None,
        uid: str | None = None,
        version: str | None = None,
    ) -> Json:
        """Delete an object. A pod that a node may still run is only marked, see `finalize`.

        `grace` in seconds: 0 deletes at once, None means the pod's own period. Returns the last
        version of the object that watchers got.

        Raises:
            NotFoundError: there is none.
            ConflictError: it has another UID, or another version.
        """
        current = self.get(resource, namespace, name)
        _require(resource, current, uid, version)
        if resource != "pods":
            return self._remove(resource, _key(resource, namespace, name))
        if grace is None:
            grace = current["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE)
        grace = max(grace, 1) if grace else 0  # a negative period means 1 s
        is_over = (current.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if grace and current["spec"].get("nodeName") and not is_over:
            return self._mark(namespace, name, grace)
        return self._end(namespace, name)

    def finalize(self, namespace: str, name: str, *, uid: str | None = None) -> None:
        """Remove a pod after the kubelet has stopped all its containers.

        Raises:
            NotFoundError: no such pod.
            ConflictError: it has another UID.
        """
        _require("pods", self.get("pods", namespace, name), uid, None)
        self._end(namespace, name)

    def subscribe(
        self,
        resource: str,
        since: int | None,
        *,
        namespace: str | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Subscription:
        """Follow the objects that match: an endless async iterator of `Change`.

        `since` None starts with one ADDED for each existing object. A number continues after that
        version.

        Raises:
            GoneError: `since` is older than the history.
            BadRequestError: the real server does not select by a field.
        """
        chosen = Selection(resource, namespace, dict(fields or {}))
        found = self.select(resource, namespace=namespace, fields=fields)
        return self._history.follow(chosen, since, found)

    def forget_history(self) -> None:
        """Drop the history, as a compaction does. Watches from an old version get GoneError.

        Subscribers that are up to date continue.
        """
        self._history.forget()

    def _write(self, resource: str, key: tuple[str, str], fresh: Json) -> Json:
        fresh["metadata"]["resourceVersion"] = str(self._history.version + 1)
        before = self._objects[resource].get(key)
        self._objects[resource][key] = fresh
        self._history.append(resource, before, fresh)
        return fresh

    def _remove(self, resource: str, key: tuple[str, str]) -> Json:
        before = self._objects[resource].pop(key)
        self._history.append(resource, before, None)
        return before | {"metadata": before["metadata"] | {"resourceVersion": str(self.version)}}

    def _end(self, namespace: str, name: str) -> Json:
        self._mark(namespace, name, 0)
        return self._remove("pods", _key("pods", namespace, name))

    def _mark(self, namespace: str, name: str, grace: int) -> Json:
        """Mark a pod as deleted. A later deadline does not replace an earlier one."""

        def mark(fresh: Json) -> Json:
            metadata = fresh["metadata"]
            left = metadata.get("deletionGracePeriodSeconds")
            if left is None:
                metadata["deletionTimestamp"] = self._stamp(grace)
            elif grace < left:
                due = datetime.fromisoformat(metadata["deletionTimestamp"])
                metadata["deletionTimestamp"] = _text(due - timedelta(seconds=left - grace))
            else:
                return fresh
            metadata["deletionGracePeriodSeconds"] = grace
            return fresh

        return self.update("pods", namespace, name, mark)

    def _snapshot(self, resource: str, version: int) -> dict[tuple[str, str], Json]:
        objects = dict(self._objects[resource])
        for record in reversed(self._history.after(resource, version)):
            named = (record.after or record.before or {})["metadata"]
            key = _key(resource, named.get("namespace", ""), named["name"])
            if record.before is None:
                objects.pop(key)
            else:
                objects[key] = record.before
        return objects

    def _stamp(self, ahead: int = 0) -> str:
        return _text(self._clock.now() + timedelta(seconds=ahead))


def _text(moment: datetime) -> str:
    return moment.strftime(_STAMP)


def _key(resource: str, namespace: str, name: str) -> tuple[str, str]:
    return ("" if resource in CLUSTER_SCOPED else namespace, name)


def _require(resource: str, current: Json, uid: str | None, version: str | None) -> None:
    held = current["metadata"]
    refused = f'Operation cannot be fulfilled on {resource} "{held["name"]}": '
    if uid is not None and uid != held["uid"]:
        raise ConflictError(refused + f"the UID is {held['uid']}, not {uid}")
    if version is not None and version != held["resourceVersion"]:
        raise ConflictError(
            refused + "the object has been modified; please apply your changes to the latest "
            "version and try again"
        )
