"""The scheduler's port to an API server, the queue of its requests, and its Events.

Source: client-go's flow control (util/flowcontrol, a token bucket per client) with the values of
HAMi v2.10 cmd/scheduler/main.go, `--kube-qps` and `--kube-burst`. The scheduler has one client:
reads, writes, bindings and Events share its queue. A waiting request delays only its caller.
"""

import asyncio
import contextlib
import hashlib
from typing import Any, Final, Protocol

import structlog

from agent.kit.tasks import Allowance
from agent.ports import Clock
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.scheduler.filter import Notice
from agent.sandbox.store import Json, NotFoundError, ObjectStore, StatusError

log = structlog.get_logger(__name__)


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
                node, bound = given["target"]["name"], given["metadata"]
                return self._store.bind(namespace, bound["name"], node, uid=bound["uid"])


class QueuedCluster:
    """Another port behind the limit of a client: `burst` requests at once, then `rate` a second.

    Requests are sent in the order of their calls.
    """

    def __init__(self, cluster: SchedulerCluster, rate: float, burst: int) -> None:
        self._cluster = cluster
        self._allowance = Allowance(burst, 1 / rate)

    async def turn(self) -> None:
        """Wait until the next request may be sent."""
        now = asyncio.get_running_loop().time()
        wait = self._allowance.wait(now)
        self._allowance.spend(now)
        if wait:
            await asyncio.sleep(wait)

    async def request(self, *asked: Any, **more: Any) -> Json:  # noqa: ANN401 -- handed on
        """See `SchedulerCluster.request`."""
        await self.turn()
        return await self._cluster.request(*asked, **more)


_BURST: Final = 25
_REFILL: Final = 300.0
_STAMP: Final = "%Y-%m-%dT%H:%M:%SZ"


class EventRecorder:
    """Writes Events whose source is `component`; each is written when `record` returns.

    Source: client-go's tools/record: one request for each Event (POST, then PATCH for the same
    text), and at most 25 at once and one in five minutes about the same pod.
    """

    def __init__(self, cluster: SchedulerCluster, clock: Clock, component: str) -> None:
        self._cluster = cluster
        self._clock = clock
        self._component = component
        self._written: dict[tuple[str, str, str], str] = {}
        """The name of the Event of each UID, reason and text."""
        self._quotas: dict[str, Allowance] = {}

    async def record(self, pod: Json, notice: Notice) -> None:
        """Write one Event about a pod, or the new time of one with the same text."""
        metadata = pod["metadata"]
        quota = self._quotas.setdefault(metadata["uid"], Allowance(_BURST, _REFILL))
        if quota.admit() is None:
            return
        try:
            await self._write(metadata, notice)
        except StatusError as refusal:
            log.warning("scheduler.event_lost", reason=notice.reason, err=str(refusal))

    async def _write(self, metadata: Json, notice: Notice) -> None:
        key, now = (metadata["uid"], notice.reason, notice.message), self._clock.now()
        where, stamp = ("events", metadata["namespace"]), now.strftime(_STAMP)
        if name := self._written.get(key):
            # One that was removed is written anew.
            with contextlib.suppress(NotFoundError):
                await self._cluster.request("patch", *where, name, {"lastTimestamp": stamp})
                return
        text = f"{' '.join(key)} {int(now.timestamp() * 1e6)}".encode()
        name = f"{metadata['name']}.{hashlib.sha256(text).hexdigest()[:16]}"
        about = {part: metadata[part] for part in ("namespace", "name", "uid")}
        fresh = {
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", **about},
            "type": notice.type,
            "reason": notice.reason,
            "message": notice.message,
            "source": {"component": self._component},
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
        }
        await self._cluster.request("create", *where, name, fresh)
        self._written[key] = name
