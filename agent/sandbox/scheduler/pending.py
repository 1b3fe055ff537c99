"""The queue of pods that wait for a node, and when each is due."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.usage import TERMINAL


@dataclass(frozen=True, slots=True)
class PlacingBackoff:
    """Seconds before a pod whose placing failed is tried again: doubling from first to most.

    kube-scheduler checks once a second which pods are due.
    """

    first: float = 1.0
    most: float = 10.0

    def delay(self, failures: int) -> float:
        """The wait after that many failures in a row."""
        return min(self.first * 2.0 ** (failures - 1), self.most)


@dataclass(slots=True)
class _UnplacedPod:
    namespace: str
    name: str
    due: float = 0.0
    failures: int = 0
    is_taken: bool = False
    """It is being placed, so it is not due."""


class PendingPods:
    """The queue, in order of arrival; times are of the running loop's clock."""

    def __init__(self, scheduler_name: str, backoff: PlacingBackoff) -> None:
        self._scheduler_name = scheduler_name
        self._backoff = backoff
        self._waiting: dict[str, _UnplacedPod] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def observe(self, pod: Json) -> bool:
        """Take in a pod that was added or changed. Returns True if it is new here."""
        uid = pod["metadata"]["uid"]
        if not self.is_waiting(pod):
            self.forget(uid)
            return False
        if uid in self._waiting:
            return False
        self._waiting[uid] = _UnplacedPod(pod["metadata"]["namespace"], pod["metadata"]["name"])
        return True

    def is_waiting(self, pod: Json) -> bool:
        """Whether this scheduler has to place the pod."""
        is_ours = pod["spec"].get("schedulerName") == self._scheduler_name
        is_over = pod["status"].get("phase") in TERMINAL or "deletionTimestamp" in pod["metadata"]
        return is_ours and not is_over and not pod["spec"].get("nodeName")

    def forget(self, uid: str) -> None:
        """Remove the pod."""
        self._waiting.pop(uid, None)

    def due(self, now: float) -> Iterator[tuple[str, str, str]]:
        """UID, namespace and name of the pods to try now."""
        for uid, waiting in list(self._waiting.items()):
            if not waiting.is_taken and waiting.due <= now:
                yield uid, waiting.namespace, waiting.name

    def next_due(self) -> float | None:
        """The loop time at which the next pod is due, or None."""
        free = (waiting for waiting in self._waiting.values() if not waiting.is_taken)
        return min((waiting.due for waiting in free if waiting.due < math.inf), default=None)

    def take(self, uid: str) -> None:
        """Mark the pod as being placed, until it is parked, delayed or forgotten."""
        self._waiting[uid].is_taken = True

    def park(self, uid: str) -> None:
        """Let a pod that fits nowhere wait for a change."""
        if uid in self._waiting:
            self._waiting[uid].is_taken = False
            self._waiting[uid].due = math.inf

    def delay(self, uid: str, now: float) -> None:
        """Let a pod whose placing failed wait for its back-off and the next whole second."""
        if uid in self._waiting:
            waiting = self._waiting[uid]
            waiting.is_taken = False
            waiting.failures += 1
            waiting.due = math.ceil(now + self._backoff.delay(waiting.failures))

    def stir(self) -> None:
        """Make parked pods due after a change. Pods that wait after a failure still wait."""
        for waiting in self._waiting.values():
            if waiting.due == math.inf:
                waiting.due = 0.0
