"""Events in the store: one object for each text about a pod, counted when it comes again."""

import hashlib
from typing import Final

from agent.core.ports import Clock
from agent.sandbox.api_errors import Json, NotFoundError
from agent.sandbox.scheduler.filter import Notice
from agent.sandbox.store import ObjectStore

_STAMP: Final = "%Y-%m-%dT%H:%M:%SZ"


class EventRecorder:
    """Writes Events whose source is `component`."""

    def __init__(self, store: ObjectStore, clock: Clock, component: str) -> None:
        self._store = store
        self._clock = clock
        self._component = component

    def record(self, pod: Json, notice: Notice) -> None:
        """Write one Event about a pod, or count one of the same text on."""
        metadata = pod["metadata"]
        text = f"{metadata['uid']} {notice.reason} {notice.message}"
        name = f"{metadata['name']}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        now = self._clock.now().strftime(_STAMP)

        def again(event: Json) -> Json:
            return event | {"count": event["count"] + 1, "lastTimestamp": now}

        try:
            self._store.update("events", metadata["namespace"], name, again)
        except NotFoundError:
            self._store.create("events", self._fresh(metadata, name, notice, now))

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
