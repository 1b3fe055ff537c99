"""The API server's memory and refusals: JSON objects with versions and graceful deletion.

- All resources share one version counter. A write without a change does not count.
- A stored object is never changed in place, so readers may keep it.
- A deleted pod is marked first, so watchers get two events.
- The history of writes is bounded. A watch has only a cursor in it, so a slow one costs no memory.
  It gets `GoneError` once the history no longer has its position.
"""

import random
import uuid
from bisect import bisect_right
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final, NamedTuple, Self

from typing_extensions import override

from agent.kit.cell import Cell, News
from agent.ports import Clock

# The API server's refusals: one class for each reason of a Status object.

Json = dict[str, Any]
"""A plain JSON object, as stored and as sent."""


class StatusError(Exception):
    """A refusal of the API server; its text is the message of the Status object."""

    code: ClassVar[int] = 500
    reason: ClassVar[str] = "InternalError"

    @override
    def __init_subclass__(cls, *, code: int, reason: str) -> None:
        super().__init_subclass__()
        cls.code, cls.reason = code, reason

    def status(self) -> Json:
        """The `Status` object that a client of the real server receives, without its details."""
        told = {"message": str(self), "reason": self.reason, "code": self.code}
        return status_of("Failure") | told


def status_of(status: str) -> Json:
    """A `Status` object: `Success` or `Failure`."""
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": status}


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


class Change(NamedTuple):
    """One event of a watch: `type` is ADDED, MODIFIED or DELETED."""

    type: str
    object: Json
    resource_version: int


class WriteRecord(NamedTuple):
    """One write, with the object before and after it."""

    version: int
    before: Json | None
    after: Json | None


class Selection(NamedTuple):
    """The objects of one list or watch: by resource and field selector."""

    resource: str
    fields: Mapping[str, str]

    def has(self, stored: Json | None) -> bool:
        """Whether it contains the object."""
        if stored is None:
            return False
        for field, wanted in self.fields.items():
            label, is_unlike, _ = field.partition("!=")
            part, _, key = label.partition(".")
            value = (stored.get(part) or {}).get(key) or ""
            if (value != wanted) is not bool(is_unlike):
                return False
        return True

    def see(self, record: WriteRecord) -> Change | None:
        """The event of one write for the watcher. Entering the selection is ADDED.

        DELETED has the object as it last matched, with the version of the write that ended this
        (apiserver/pkg/storage/cacher/cache_watcher.go:convertToWatchEvent).
        """
        version, before, after = record
        was_in = self.has(before)
        if after is not None and self.has(after):
            return Change("MODIFIED" if was_in else "ADDED", after, version)
        if before is None or not was_in:
            return None
        return Change("DELETED", _at_version(before, version), version)


@dataclass(eq=False)
class Subscription:
    """An endless iterator over the changes of one selection. Cancelling `anext` loses no change."""

    _store: "ObjectStore"
    _selection: Selection
    cursor: int
    _found: list[Json]
    """What it has still to tell of the beginning."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while (change := self.take()) is None:
            await News(self._store.writes).wait()
        return change

    @property
    def is_started(self) -> bool:
        """True once all initial objects were taken."""
        return not self._found

    def take(self) -> Change | None:
        """The next change, or None if there is none yet.

        Raises GoneError: the history no longer has this subscriber's position.
        """
        if self._found:
            first = self._found.pop(0)
            return Change("ADDED", first, int(first["metadata"]["resourceVersion"]))
        for record in self._store.after(self._selection.resource, self.cursor):
            self.cursor = record.version
            if change := self._selection.see(record):
                return change
        self.cursor = max(self.cursor, self._store.version)
        return None


class ObjectStore:
    """Nodes, pods, events, quotas and namespaces of one cluster; synchronous, for one event loop.

    The store returns its own objects: read them, never change them. It keeps the latest `history`
    writes of each resource. `writes` changes with each write.
    """

    def __init__(self, clock: Clock, rng: random.Random, history: int = 1000) -> None:
        self._clock = clock
        self._rng = rng
        self._limit = history
        self._objects: dict[str, dict[tuple[str, str], Json]] = {kind: {} for kind in KINDS}
        self._records: dict[str, list[WriteRecord]] = {kind: [] for kind in KINDS}
        self._forgotten = dict.fromkeys(KINDS, 0)
        self.version = 1
        """The resource version of the latest write."""
        self.writes = Cell(self.version)

    def get(self, resource: str, namespace: str, name: str) -> Json:
        """The object of that name; Nodes have no namespace. Raises NotFoundError."""
        found = self._objects[resource].get(_key(resource, namespace, name))
        if found is None:
            raise NotFoundError(f'{resource} "{name}" not found')
        return found

    def select(self, resource: str, *, fields: Mapping[str, str] | None = None) -> list[Json]:
        """All objects that match, by namespace and name."""
        selection, objects = Selection(resource, fields or {}), self._objects[resource]
        return [objects[key] for key in sorted(objects) if selection.has(objects[key])]

    def create(self, resource: str, obj: Json) -> Json:
        """Store a new object with a UID, a creation time and a version.

        Raises AlreadyExistsError; InvalidError: no name.
        """
        fresh = deepcopy(obj)
        metadata = fresh.setdefault("metadata", {})
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = f"{metadata['generateName']}{self._rng.getrandbits(20):05x}"
        if not metadata.get("name"):
            raise InvalidError("metadata.name: Required value: name or generateName is required")
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
    ) -> Json:
        """Replace an object by the result of `change` on a copy. Without a difference, no write.

        Raises NotFoundError; ConflictError: another UID, or the result names another version;
        InvalidError: the result names another UID.
        """
        current = self._require(resource, namespace, name, uid)
        fresh = change(deepcopy(current))
        held, given = current["metadata"], fresh["metadata"]
        if given["resourceVersion"] != held["resourceVersion"]:
            raise ConflictError(f"{resource} {name}: the object has been modified")
        if given["uid"] != held["uid"]:
            raise InvalidError(f"metadata.uid: Invalid value: {given['uid']}")
        if fresh == current:
            return current
        return self._write(resource, _key(resource, namespace, name), fresh)

    def bind(self, namespace: str, name: str, node_name: str, *, uid: str | None = None) -> Json:
        """Assign a pod to a node, as the binding subresource does. Raises StatusError."""

        def assign(pod: Json) -> Json:
            if pod["metadata"].get("deletionTimestamp"):
                raise ConflictError(f"pod {name} is being deleted, cannot be assigned to a host")
            if taken := pod["spec"].get("nodeName"):
                raise ConflictError(f'pod {name} is already assigned to node "{taken}"')
            pod["spec"]["nodeName"] = node_name
            held = pod["status"].get("conditions") or []
            scheduled = {"type": "PodScheduled", "status": "True"}
            scheduled["lastTransitionTime"] = self._stamp()
            others = [entry for entry in held if entry["type"] != "PodScheduled"]
            pod["status"]["conditions"] = [*others, scheduled]
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
    ) -> Json:
        """Delete an object. A pod that a node may still run is only marked.

        `grace` in seconds: 0 deletes at once, None means the pod's own period. Returns the last
        version of the object that watchers got. Raises NotFoundError; ConflictError: another UID.
        """
        current = self._require(resource, namespace, name, uid)
        if resource != "pods":
            return self._remove(resource, _key(resource, namespace, name))
        if grace is None:
            grace = current["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE)
        is_over = (current.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if grace and current["spec"].get("nodeName") and not is_over:
            return self._mark(namespace, name, max(grace, 1))  # a negative period means 1 s
        self._mark(namespace, name, 0)
        return self._remove("pods", (namespace, name))

    def subscribe(
        self, resource: str, since: int | None, *, fields: Mapping[str, str] | None = None
    ) -> Subscription:
        """Follow the objects that match: an endless async iterator of `Change`.

        `since` None starts with one ADDED for each existing object. A number continues after that
        version. Raises GoneError: `since` is older than the history.
        """
        selection = Selection(resource, fields or {})
        if since is None:
            found = self.select(resource, fields=fields)
            return Subscription(self, selection, self.version, found)
        self.after(resource, since)
        return Subscription(self, selection, since, [])

    def after(self, resource: str, since: int) -> list[WriteRecord]:
        """The writes after a version. Raises GoneError: the history has not all of them."""
        if since < (oldest := self._forgotten[resource]):
            raise GoneError(f"too old resource version: {since} ({oldest})")
        records = self._records[resource]
        return records[bisect_right(records, since, key=lambda record: record.version) :]

    def forget_history(self) -> None:
        """Drop the history, as a compaction does. Subscribers that are not up to date are Gone."""
        for resource, records in self._records.items():
            records.clear()
            self._forgotten[resource] = self.version

    def _write(self, resource: str, key: tuple[str, str], fresh: Json) -> Json:
        fresh["metadata"]["resourceVersion"] = str(self.version + 1)
        before = self._objects[resource].get(key)
        self._objects[resource][key] = fresh
        self._record(resource, before, fresh)
        return fresh

    def _remove(self, resource: str, key: tuple[str, str]) -> Json:
        before = self._objects[resource].pop(key)
        self._record(resource, before, None)
        return _at_version(before, self.version)

    def _record(self, resource: str, before: Json | None, after: Json | None) -> None:
        """Note a write under the next version, and wake all followers."""
        self.version += 1
        records = self._records[resource]
        records.append(WriteRecord(self.version, before, after))
        if len(records) > self._limit:
            self._forgotten[resource] = records[-self._limit - 1].version
            del records[: -self._limit]
        self.writes.set(self.version)

    def _mark(self, namespace: str, name: str, grace: int) -> Json:
        """Mark a pod as deleted."""

        def mark(fresh: Json) -> Json:
            fresh["metadata"]["deletionTimestamp"] = self._stamp(grace)
            fresh["metadata"]["deletionGracePeriodSeconds"] = grace
            return fresh

        return self.update("pods", namespace, name, mark)

    def _require(self, resource: str, namespace: str, name: str, uid: str | None) -> Json:
        current = self.get(resource, namespace, name)
        if uid is not None and uid != (held := current["metadata"]["uid"]):
            raise ConflictError(f"{resource} {name}: the UID is {held}, not {uid}")
        return current

    def _stamp(self, ahead: int = 0) -> str:
        moment = self._clock.now() + timedelta(seconds=ahead)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _at_version(stored: Json, version: int) -> Json:
    return stored | {"metadata": stored["metadata"] | {"resourceVersion": str(version)}}


def _key(resource: str, namespace: str, name: str) -> tuple[str, str]:
    return ("" if resource in CLUSTER_SCOPED else namespace, name)
