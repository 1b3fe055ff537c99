"""What must hold where nothing fails: nobody is refused, nobody gets another's, no lock stays.

There is one kind of pod that may be refused: one that was gone from the API server before its
Allocate was over. It may also hear the answer of the pod that has its name now, for it ends at
once. With a kubelet that has no Get the others may be refused as well, and are counted.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable

from agent.cluster import ALLOCATED, BIND_PHASE, PHASE_SUCCESS
from agent.hami.annotations import decode_pod_devices
from agent.sandbox.kubelet.pods import ContainerKey as Owner
from agent.sandbox.kubelet.pods import KubeletEvent
from agent.sandbox.store import Json
from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.builders import NODE
from tests.machine.audit import Audit, asked_containers, key_of, lock_of, owner_in, uid_of
from tests.machine.pods import Placement

SERVED_LIMIT = 5.0
GONE_LIMIT = 35.0
"""Seconds for which the lock of an owner that was answered or is over, or is gone, may stay."""

_NO_RIGHT = ("2004", "2005")
_NO_ROOM = ("4003", "4004")
_NO_IDS = ("requested number of devices unavailable", "Node didn't have enough resource")
"""What the kubelet says where all ids are held. It keeps those of init containers for as long as
their pod lives, and HAMi does not count them any more when they have succeeded."""

_MANY = "2002"
GHOST = 2.0
"""Seconds for which a kubelet may still know a pod that is gone from the API server."""

_OVER = ("Succeeded", "Failed")


class CalmAudit(Audit):
    """The strict audit. `lenient`: refusals are counted only.

    `tally` counts what happened. `excused`: pods that were refused rightly.
    """

    lenient = False
    serves_unlocked = False
    """Whether the agent serves pods without a lock."""

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]  # as Audit has them
        self.tally: Counter[str] = Counter()
        self.all_listed: Callable[[], bool] = lambda: False
        """Whether the agent offers all that there is."""
        self.was_shown: Callable[[str], bool] = lambda _: True
        """Whether the agent's watch of the Node has shown this lock."""
        self.excused: set[str] = set()
        self._served: dict[str, float] = {}
        """When a pod was answered in full."""
        self._over: dict[str, float] = {}
        self._gone: dict[str, float] = {}
        self._placed_again: dict[str, Placement] = {}
        self._lock: tuple[str, float, str | None] | None = None
        self._let_go = ""
        """The lock that the agent removed last."""
        self._robbed: dict[str, str] = {}
        """Pods whose lock HAMi removed again, and the lock.

        Two binds that both find the lock of a pod that is gone remove it one after the other, and
        the second one removes what the first one took for its pod (HAMi v2.10.0
        pkg/util/nodelock/nodelock.go, LockNode).
        """
        self._heirs: set[str] = set()
        """Pods that HAMi took for the owner of a namesake's lock, and whose agent let it go before
        they were bound: its watch could not show them, and they are bound without a lock."""

    def finish(self) -> None:
        """The history is over."""
        if self._lock is not None:
            self._judge_lock(*self._lock)

    def is_gone(self, uid: str) -> bool:
        """Whether the API server has no such pod any more."""
        return uid not in self._pods

    def answered(self, response: ContainerAllocateResponse) -> None:
        owner = owner_in(response)
        self.tally["answered"] += 1
        super().answered(response)
        pod = self._pods.get(owner[0])
        if pod is not None:
            left = {*asked_containers(pod)} - {
                name for uid, name in self.answers if uid == owner[0]
            }
            if not left:
                self._served.setdefault(owner[0], _now())

    def released(self, value: str) -> None:
        self._let_go = value
        super().released(value)

    def _needs_no_lock(self, uid: str) -> bool:
        return super()._needs_no_lock(uid) or self._cannot_be_seen(uid)

    def _cannot_be_seen(self, uid: str) -> bool:
        """Whether the owner was not bound in 30 s, for it waits in the scheduler's queue.

        It must be served all the same when it comes.
        """
        pod, lock = self.pod(uid), self._lock
        is_here = pod is not None and pod["spec"].get("nodeName") == NODE
        if is_here or lock is None or _now() - lock[1] < 30.0:
            return False
        self.tally["a lock went 30 s before its owner was bound"] += 1
        return True

    def _is_heard_by_a_ghost(self, uid: str, heir: str) -> bool:
        """The same; nothing tells of a pod that is gone again, and may then be taken for another.

        That one has no lock and the name of a pod that the kubelet still ends, or the kubelet has
        no Get. The containers of a pod that is gone never start.
        """
        is_heir = self._names.get(uid) == self._names.get(heir)
        if is_heir and super()._is_heard_by_a_ghost(uid, heir):
            self.tally["a gone pod heard its successor's answer"] += 1
            return True
        if (self.lenient or super()._needs_no_lock(heir)) and self.is_gone(uid):
            self.tally["a gone pod that nothing told of heard another's answer"] += 1
            return True
        return False

    def _hear(self, event: KubeletEvent) -> None:
        super()._hear(event)
        if event.kind in ("rejected", "container_waiting"):
            self._judge_refusal(event.pod, event.text)

    def _judge_refusal(self, uid: str, text: str) -> None:
        gate = text.rpartition("[HA-")[2].partition("]")[0] if "[HA-" in text else ""
        if self.is_gone(uid):
            self.tally["a gone pod was refused"] += 1
            return
        why = self._why_right(uid, gate, text)
        self.tally[why or f"refused {gate}"] += 1
        if why or (gate and self.lenient):
            self.excused.add(uid)
        else:
            what = "a good pod was refused" if gate else "the kubelet rejected a pod"
            self._breach(what, self._names.get(uid, "?"), uid, text)

    def _why_right(self, uid: str, gate: str, text: str) -> str:
        """Why a pod that is there was refused rightly; empty: it was not."""
        if gate in _NO_ROOM and self.room.is_oversold(uid):
            return "refused, for the scheduler had sold its room"
        if any(words in text for words in _NO_IDS) and self.all_listed():
            return "rejected, for the scheduler had sold its slice"
        if gate in _NO_RIGHT and uid in self._robbed and not self.was_shown(self._robbed[uid]):
            return "refused, for HAMi took its lock back before the watch had shown it"
        if gate in _NO_RIGHT and uid in self._heirs:
            return "refused, for HAMi gave it the lock of a namesake that was over"
        if gate == _MANY and self.serves_unlocked and self._has_ghost(uid, text):
            return "refused, for a pod without a lock has the name of one that just ended"
        return ""

    def _has_ghost(self, uid: str, text: str) -> bool:
        """Whether another pod that the refusal names just took the name of one that is gone.

        PodResources tells no UID. Without a lock the agent cannot know whether the kubelet admits
        the new one or has not forgotten the old one.
        """
        return any(
            self._names[gone] != self._names.get(uid)
            and self._names[gone].replace(",", "/") in text
            for gone, when in self._gone.items()
            if gone in self._names and _now() - when < GHOST
        )

    def _told(self, resource: str, before: Json | None, after: Json | None) -> None:
        super()._told(resource, before, after)
        if resource == "nodes" and lock_of(before) != lock_of(after):
            self._see_lock(lock_of(after))
        if resource != "pods":
            return
        if after is None:
            self._gone[uid_of(before or {})] = _now()
        else:
            self._see_pod(uid_of(after), before, after)

    def _see_pod(self, uid: str, before: Json | None, after: Json) -> None:
        text = (after["metadata"].get("annotations") or {}).get(ALLOCATED)
        if text is not None and text != _noted(before):
            self._place(uid, after, tuple(map(tuple, decode_pod_devices(text))))
        if before is None:
            self.tally["pods"] += 1
        elif not before["spec"].get("nodeName") and after["spec"].get("nodeName"):
            self.tally["bound"] += 1
        if before is not None and _phase_of(before) == PHASE_SUCCESS != _phase_of(after):
            self._scheduler.bound_again.add(uid)  # the marks of a bind that fails
        phase = after["status"].get("phase")
        if phase in _OVER:
            self._over.setdefault(uid, _now())

    def _place(self, uid: str, pod: Json, groups: Placement) -> None:
        """HAMi wrote what a pod gets.

        It may do so once more for a pod that is bound: kube-scheduler had not waited for its bind.
        Both are right then, and what the scheduler takes for free from now on need not be.
        """
        if pod["spec"].get("nodeName") and uid in self._scheduler.placed:
            self.tally["placed again after its binding"] += 1
            self._placed_again[uid] = groups
        else:
            self._scheduler.placed[uid] = groups

    def _check_share(self, owner: Owner, response: ContainerAllocateResponse) -> None:
        again, placed = self._placed_again.get(owner[0]), self._scheduler.placed
        if again is None:
            super()._check_share(owner, response)
            return
        found, first = len(self.breaches), placed[owner[0]]
        super()._check_share(owner, response)
        if len(self.breaches) > found:
            del self.breaches[found:]
            placed[owner[0]] = again
            super()._check_share(owner, response)
            placed[owner[0]] = first

    def _see_lock(self, text: str) -> None:
        if self._lock is not None:
            self._judge_lock(*self._lock)
            before, _, first = self._lock
            heir = self._named_by(before)  # HAMi lets the next of a name take it over as it is
            if heir is not None and before != self._let_go:
                self._robbed[heir] = before
            elif heir not in (None, first) and not self._pods[heir]["spec"].get("nodeName"):
                self._heirs.add(heir)
        owner = self._named_by(text)
        self._lock = (text, _now(), owner) if text else None
        if owner is not None:
            self._robbed.pop(owner, None)
            self._heirs.discard(owner)

    def _named_by(self, text: str) -> str | None:
        """The pod that has the name in a lock now."""
        key = text.partition(",")[2]
        return next((uid for uid, pod in self._pods.items() if key_of(pod) == key), None)

    def _judge_lock(self, text: str, since: float, owner: str | None) -> None:
        """How long it stood for nothing.

        One that was taken after its owner had its answers is HAMi's own to remove: kube-scheduler
        had not waited for the first bind, and the second one fails.
        """
        limits = []
        served, over = (when.get(owner or "", -1.0) for when in (self._served, self._over))
        gone = self._gone.get(owner or "", math.inf if owner else since)
        if served >= since and gone > served + SERVED_LIMIT:
            limits.append(served + SERVED_LIMIT)
        elif over >= since and gone > over + SERVED_LIMIT:
            limits.append(over + SERVED_LIMIT)
        if gone < math.inf:
            limits.append(max(since, gone) + GONE_LIMIT)
        if limits and _now() > min(limits):
            self._breach(f"a lock stood {_now() - min(limits):.1f} s too long", text)

    def _breach(self, what: str, *about: object) -> None:
        super()._breach(f"{what} at {_now():.3f}", *about)


def _noted(pod: Json | None) -> str | None:
    text: str | None = ((pod or {"metadata": {}})["metadata"].get("annotations") or {}).get(
        ALLOCATED
    )
    return text


def _phase_of(pod: Json) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(BIND_PHASE, ""))


def _now() -> float:
    return asyncio.get_running_loop().time()
