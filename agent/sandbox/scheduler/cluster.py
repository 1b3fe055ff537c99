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
    """The reads and writes of filter, bind and ingestion."""

    async def request(
        self,
        verb: str,
        resource: str,
        namespace: str,
        name: str,
        body: Json | None = None,
        *,
        version: str | None = None,
    ) -> Json:
        """One request: get, create, a merge patch, or bind of a pod; returns the object.

        `namespace` is ignored for nodes. `version`: patch only this version of the object.

        Raises:
            StatusError: the API server refuses it.
        """
        ...


class StoreCluster:
    """Implements the port over an object store in this process; it never waits."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def request(
        self,
        verb: str,
        resource: str,
        namespace: str,
        name: str,
        body: Json | None = None,
        *,
        version: str | None = None,
    ) -> Json:
        """See `SchedulerCluster.request`."""
        given = body or {}
        match verb:
            case "get":
                return self._store.get(resource, namespace, name)
            case "create":
                return self._store.create(resource, given)
            case "patch":
                where = (resource, namespace, name)
                return self._store.update(
                    *where, lambda held: merge_patch(held, given), resource_version=version
                )
            case _:
                node, uid = given["target"]["name"], given["metadata"]["uid"]
                return self._store.bind(namespace, name, node, uid=uid)


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
    """Implements `SchedulerCluster` over another one: each request waits for its turn."""

    def __init__(self, cluster: SchedulerCluster, queue: ClientQueue) -> None:
        self._cluster = cluster
        self._queue = queue

    async def request(
        self,
        verb: str,
        resource: str,
        namespace: str,
        name: str,
        body: Json | None = None,
        *,
        version: str | None = None,
    ) -> Json:
        """See `SchedulerCluster.request`."""
        await self._queue.turn()
        return await self._cluster.request(verb, resource, namespace, name, body, version=version)
