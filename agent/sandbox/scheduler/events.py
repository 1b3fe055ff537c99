"""Events about pods: one object for each text about a pod, counted when it comes again."""

import hashlib
from typing import Final, Protocol

import structlog

from agent.core.ports import Clock
from agent.sandbox.api_errors import AlreadyExistsError, Json, NotFoundError, StatusError
from agent.sandbox.scheduler.cluster import Cluster
from agent.sandbox.scheduler.filter import Notice

log = structlog.get_logger(__name__)
_STAMP: Final = "%Y-%m-%dT%H:%M:%SZ"


class Events(Protocol):
    """Who is told what was decided about a pod."""

    async def record(self, pod: Json, notice: Notice) -> None:
        """Have one Event written about a pod; nothing comes of it when that fails."""
        ...


class EventRecorder:
    """Writes Events whose source is `component`; each is written when `record` returns."""

    def __init__(self, cluster: Cluster, clock: Clock, component: str) -> None:
        self._cluster = cluster
        self._clock = clock
        self._component = component

    async def record(self, pod: Json, notice: Notice) -> None:
        """Write one Event about a pod, or count one of the same text on.

        An Event that the API server does not take is only logged: no decision hangs on it.
        """
        metadata = pod["metadata"]
        text = f"{metadata['uid']} {notice.reason} {notice.message}"
        name = f"{metadata['name']}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        try:
            await self._write(metadata, name, notice)
        except StatusError as refusal:
            log.warning("scheduler.event_lost", reason=notice.reason, err=str(refusal))

    async def _write(self, metadata: Json, name: str, notice: Notice) -> None:
        now = self._clock.now().strftime(_STAMP)
        try:
            held = await self._cluster.get("events", metadata["namespace"], name)
        except NotFoundError:
            try:
                fresh = self._fresh(metadata, name, notice, now)
                await self._cluster.create("events", metadata["namespace"], fresh)
            except AlreadyExistsError:  # another decision said the same meanwhile
                held = await self._cluster.get("events", metadata["namespace"], name)
            else:
                return
        again = {"count": held["count"] + 1, "lastTimestamp": now}
        await self._cluster.patch("events", metadata["namespace"], name, again)

    def _fresh(self, metadata: Json, name: str, notice: Notice, now: str) -> Json:
        return {
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": notice.type,
            "reason": notice.reason,
            "message": notice.message,
            "source": {"component": self._component},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
