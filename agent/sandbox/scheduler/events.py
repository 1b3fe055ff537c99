"""Events about pods: sent one after another beside the verbs; a repeated Event is counted.

Source: client-go's tools/record: one request for each Event (POST, then PATCH for
the same text), and at most 25 at once and one in five minutes about the same pod.
"""

import asyncio
import hashlib
from typing import Final, NoReturn

import structlog

from agent.ports import Clock
from agent.sandbox.api_errors import Json, NotFoundError, StatusError
from agent.sandbox.scheduler.cluster import ClientQueue, SchedulerCluster
from agent.sandbox.scheduler.filter import Notice

log = structlog.get_logger(__name__)
_ABOUT_ONE_POD: Final = (1 / 300, 25)
_NAMED_BY: Final = ("namespace", "name", "uid")
_STAMP: Final = "%Y-%m-%dT%H:%M:%SZ"


class EventQueue:
    """Takes Events at once and passes them to `recorder` while it runs."""

    def __init__(self, recorder: "EventRecorder") -> None:
        self._recorder = recorder
        self._waiting: asyncio.Queue[tuple[Json, Notice]] = asyncio.Queue()

    async def record(self, pod: Json, notice: Notice) -> None:
        """Have one Event sent later."""
        metadata = pod["metadata"]
        named = {"metadata": {key: metadata[key] for key in _NAMED_BY}}
        self._waiting.put_nowait((named, notice))

    async def run(self) -> NoReturn:
        """Send for ever, one after another. Events that wait at the end are lost."""
        while True:
            await self._recorder.record(*await self._waiting.get())


class EventRecorder:
    """Writes Events whose source is `component`; each is written when `record` returns."""

    def __init__(self, cluster: SchedulerCluster, clock: Clock, component: str) -> None:
        self._cluster = cluster
        self._clock = clock
        self._component = component
        self._written: dict[tuple[str, str, str], tuple[str, int]] = {}
        """Name and count of the Event of each UID, reason and text."""
        self._quotas: dict[str, ClientQueue] = {}

    async def record(self, pod: Json, notice: Notice) -> None:
        """Write one Event about a pod, or increase the count of one with the same text.

        If the API server refuses an Event, it is only logged. If a pod had too many Events, none is
        written.
        """
        metadata = pod["metadata"]
        quota = self._quotas.setdefault(metadata["uid"], ClientQueue(*_ABOUT_ONE_POD))
        if not quota.try_turn():
            return
        try:
            await self._write(metadata, notice)
        except StatusError as refusal:
            log.warning("scheduler.event_lost", reason=notice.reason, err=str(refusal))

    async def _write(self, metadata: Json, notice: Notice) -> None:
        key, now = (metadata["uid"], notice.reason, notice.message), self._clock.now()
        name, count = self._written.get(key, ("", 0))
        where = ("events", metadata["namespace"])
        if name:
            again = {"count": count + 1, "lastTimestamp": now.strftime(_STAMP)}
            try:
                await self._cluster.request("patch", *where, name, again)
            except NotFoundError:  # it was removed, so the count begins again
                count = 0
        if not count:
            moment = int(now.timestamp() * 1e6)
            text = f"{' '.join(key)} {moment}".encode()
            name = f"{metadata['name']}.{hashlib.sha256(text).hexdigest()[:16]}"
            about = {key: metadata[key] for key in _NAMED_BY}
            fresh = {
                "metadata": {"name": name, "namespace": metadata["namespace"]},
                "involvedObject": {"apiVersion": "v1", "kind": "Pod", **about},
                "type": notice.type,
                "reason": notice.reason,
                "message": notice.message,
                "source": {"component": self._component},
                "firstTimestamp": now.strftime(_STAMP),
                "lastTimestamp": now.strftime(_STAMP),
                "count": 1,
            }
            await self._cluster.request("create", *where, name, fresh)
        self._written[key] = (name, count + 1)
