"""The scheduler's port to an API server, and the queue in which all its requests wait.

Source: client-go's flow control (util/flowcontrol, a token bucket per client) with the values of
HAMi v2.10 cmd/scheduler/main.go, `--kube-qps` and `--kube-burst`. The scheduler has one client:
reads, writes, bindings and Events share its queue. A waiting request delays only its caller.
"""

import asyncio
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


class ClientQueue:
    """A token bucket on the running loop's clock: `burst` requests at once, then `rate` a second.

    Requests are sent in the order of their calls. A rate of 0 or less means no limit.
    """

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        """A negative value is the number of waiting requests."""
        self._counted: float | None = None

    async def turn(self) -> None:
        """Wait until the next request may be sent."""
        if self._rate <= 0:
            return
        missing = -self._spend(asyncio.get_running_loop().time())
        if missing > 0:
            await asyncio.sleep(missing / self._rate)

    def try_turn(self) -> bool:
        """Take a turn only if it costs no wait."""
        now = asyncio.get_running_loop().time()
        if self._filled(now) < 1:
            return False
        self._spend(now)
        return True

    def _spend(self, now: float) -> float:
        self._tokens, self._counted = self._filled(now) - 1, now
        return self._tokens

    def _filled(self, now: float) -> float:
        if self._counted is None:
            return self._tokens
        return min(float(self._burst), self._tokens + (now - self._counted) * self._rate)


class QueuedCluster:
    """Implements `SchedulerCluster` over another one, behind a queue: each call is one request."""

    def __init__(self, cluster: SchedulerCluster, queue: ClientQueue) -> None:
        self._cluster = cluster
        self._queue = queue

    async def get(self, resource: str, namespace: str, name: str) -> Json:
        """See `SchedulerCluster.get`."""
        await self._queue.turn()
        return await self._cluster.get(resource, namespace, name)

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
        await self._queue.turn()
        return await self._cluster.patch(
            resource, namespace, name, changes, uid=uid, version=version
        )

    async def create(self, resource: str, namespace: str, obj: Json) -> None:
        """See `SchedulerCluster.create`."""
        await self._queue.turn()
        await self._cluster.create(resource, namespace, obj)

    async def bind(self, namespace: str, name: str, uid: str, node_name: str) -> None:
        """See `SchedulerCluster.bind`."""
        await self._queue.turn()
        await self._cluster.bind(namespace, name, uid, node_name)
