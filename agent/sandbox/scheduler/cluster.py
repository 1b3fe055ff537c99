"""The scheduler's port to an API server, and its implementation over the object store."""

from typing import Protocol

from agent.sandbox.api_errors import Json
from agent.sandbox.patching import merge_patch
from agent.sandbox.store import ObjectStore


class SchedulerCluster(Protocol):
    """The reads and writes of filter, bind and ingestion. Each raises StatusError if refused."""

    async def get(self, resource: str, namespace: str, name: str) -> Json:
        """The object of that name; `namespace` is ignored for nodes. Raises NotFoundError."""
        ...

    async def patch(
        self,
        resource: str,
        namespace: str,
        name: str,
        changes: Json,
        *,
        uid: str | None = None,
        version: str | None = None,
    ) -> Json:
        """Apply a merge patch, if the object still has that UID and that resource version.

        Raises NotFoundError, and ConflictError for another UID or version.
        """
        ...

    async def create(self, resource: str, namespace: str, obj: Json) -> None:
        """Store a new object. Raises AlreadyExistsError."""
        ...

    async def bind(self, namespace: str, name: str, uid: str, node_name: str) -> None:
        """Assign a pod to a node. Raises NotFoundError and ConflictError."""
        ...


class StoreCluster:
    """Implements the port over an object store in this process; it never waits."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def get(self, resource: str, namespace: str, name: str) -> Json:
        """See `SchedulerCluster.get`."""
        return self._store.get(resource, namespace, name)

    async def patch(
        self,
        resource: str,
        namespace: str,
        name: str,
        changes: Json,
        *,
        uid: str | None = None,
        version: str | None = None,
    ) -> Json:
        """See `SchedulerCluster.patch`."""
        return self._store.update(
            *(resource, namespace, name),
            lambda held: merge_patch(held, changes),
            uid=uid,
            resource_version=version,
        )

    async def create(self, resource: str, namespace: str, obj: Json) -> None:
        """See `SchedulerCluster.create`."""
        self._store.create(resource, obj | {"metadata": obj["metadata"] | {"namespace": namespace}})

    async def bind(self, namespace: str, name: str, uid: str, node_name: str) -> None:
        """See `SchedulerCluster.bind`."""
        self._store.bind(namespace, name, node_name, uid=uid)
