"""Finds the effects that are owed: for rejected pods and left-over node locks."""

import datetime as dt
from collections import Counter
from collections.abc import Iterator

import msgspec

from agent.core.cluster.annotations import BIND_PHASE, PHASE_FAILED
from agent.core.cluster.changes import NodeEvent
from agent.core.cluster.pods import (
    ContainerView,
    NodeLock,
    Phase,
    PodTable,
    PodUid,
    PodView,
    Role,
)
from agent.core.state.ledger import Effect, EffectKind, Ledger

REJECTED = "UnexpectedAdmissionError"
"""The status.reason of a pod whose Allocate was answered with an error."""

ANSWERED_GRACE = dt.timedelta(seconds=2)
"""How long a lock may stay after the last answer to its owner. The outbox is usually faster."""

UNCLAIMED = dt.timedelta(seconds=30)
"""How long the agent must have seen a lock before it removes one whose owner is not here.

The scheduler takes the lock before it binds the pod, and its client queue can delay the bind.
"""

REFUSED_AT_ONCE = 32
"""Refused pods of one namespace that are settled at a time; the others follow. One tenant can have
thousands: a pod that is bound without a scheduler stays when it is refused, and its controller
makes the next one. Each change goes through all effects that are owed."""

NOBODY = PodUid("")
"""The pod UID of an effect whose pod is not on this node."""

REFUSED_EVENT = "AllocationRefused"


class SettlementFacts(msgspec.Struct, frozen=True):
    """The facts that settlement reads.

    `standing`: for how long the agent has seen this lock while it followed the pods without a gap.
    """

    table: PodTable
    ledger: Ledger
    lock: NodeLock | None
    now: dt.datetime
    standing: dt.timedelta = dt.timedelta(0)


def refusal_text(pod: PodView) -> str:
    """The agent's refusal in the status of a pod; empty: the agent did not refuse the pod."""
    if pod.phase is not Phase.FAILED or pod.reason != REJECTED or "[HA-" not in pod.message:
        return ""
    _, found, text = pod.message.partition("desc = ")
    sentence, bracket, rest = (text if found else pod.message).partition("[HA-")
    return f"{sentence}{bracket}{rest.partition(']')[0]}]"


def event_of(effect: Effect) -> NodeEvent:
    """The Event of a post-event effect."""
    return NodeEvent(
        reason=effect.reason,
        text=effect.value,
        warning=True,
        namespace=effect.namespace,
        pod=effect.pod,
        pod_uid=effect.pod_uid,
    )


def owed(scene: SettlementFacts) -> tuple[Effect, ...]:
    """All effects that are owed now. They follow from the facts, so a restart finds them again."""
    return (*_for_rejected(scene), *_for_lock(scene))


def _for_rejected(scene: SettlementFacts) -> Iterator[Effect]:
    """Settle each pod that the agent refused as failed, and post an Event with the reason."""
    begun: Counter[str] = Counter()
    for pod in scene.table.pods.values():
        if begun[pod.namespace] >= REFUSED_AT_ONCE:
            continue
        text = refusal_text(pod)
        if not text or pod.static or pod.annotations.get(BIND_PHASE) == PHASE_FAILED:
            continue
        begun[pod.namespace] += 1
        yield _effect(EffectKind.SETTLE_POD, pod, scene.now, phase=PHASE_FAILED)
        yield _effect(EffectKind.POST_EVENT, pod, scene.now, reason=REFUSED_EVENT, value=text)


def _effect(
    kind: EffectKind,
    pod: PodView,
    due: dt.datetime,
    *,
    phase: str = "",
    value: str = "",
    reason: str = "",
) -> Effect:
    return Effect(
        kind, pod.uid, pod.namespace, pod.name, due, phase=phase, value=value, reason=reason
    )


def _for_lock(scene: SettlementFacts) -> tuple[Effect, ...]:
    """Remove the lock of an owner that no longer needs it: answered in full, terminal, or gone.

    The lock has no UID, its time stamp has no fixed order to the pod's, and Pods and Node have
    separate watches. So the owner is found in one of three ways:
    - A pod on this node was answered under exactly this lock.
    - For another owner on this node, a patch with its UID shows that no other pod has the name.
    - If the owner is not here, or asks for no GPU of ours, the lock must have stood for UNCLAIMED.
      HAMi lets a pod take over the lock of a former pod of its name, and a pod that asks for no GPU
      may wait for another vendor's plugin.
    """
    lock = scene.lock
    if lock is None or lock.owner is None or not scene.table.synced:
        return ()
    owner = scene.table.named(*lock.owner)
    if owner is not None and (owner.gpu_containers or owner.terminal):
        return _for_lock_of(owner, lock, scene)
    if scene.table.stale or scene.standing < UNCLAIMED:
        return ()
    return (_release(lock, NOBODY, scene.now),)


def _for_lock_of(owner: PodView, lock: NodeLock, scene: SettlementFacts) -> tuple[Effect, ...]:
    """The same for a lock whose owner is on this node."""
    if not owner.terminal:
        if not _answered(owner, scene):
            return ()
        if _is_noted(lock, owner, scene):
            return (_release(lock, owner.uid, scene.now),)
    phase = PHASE_FAILED if refusal_text(owner) else ""
    return (_effect(EffectKind.SETTLE_POD, owner, scene.now, phase=phase, value=lock.value),)


def _is_noted(lock: NodeLock, owner: PodView, scene: SettlementFacts) -> bool:
    """Whether the pod was answered under exactly this lock."""
    return any(row.lock == lock.value for row in scene.ledger.rows_of(owner.uid))


def _release(lock: NodeLock, uid: PodUid, now: dt.datetime) -> Effect:
    return Effect(EffectKind.RELEASE_LOCK, uid, lock.namespace, lock.name, now, value=lock.value)


def _answered(pod: PodView, scene: SettlementFacts) -> bool:
    """Whether no GPU container of the pod waits for an answer.

    A container that runs needs none: after a lost checkpoint the kubelet starts pods without an
    Allocate. But after a reboot the status is old, and the kubelet may be about to ask: so the lock
    must have stood for UNCLAIMED. An answer in the future is old, because the clock was set back.
    """
    rows = {row.key.container: row for row in scene.ledger.rows_of(pod.uid)}
    unanswered = [container for container in pod.gpu_containers if container.name not in rows]
    if unanswered and scene.standing < UNCLAIMED:
        return False
    if not all(_has_started(pod, container) for container in unanswered):
        return False
    last = max((row.answered_at for row in rows.values()), default=None)
    return last is None or not dt.timedelta(0) <= scene.now - last < ANSWERED_GRACE


def _has_started(pod: PodView, container: ContainerView) -> bool:
    """Whether the container runs or has run. Ordinary init containers end before app containers."""
    is_over = container.role is Role.INIT and pod.phase is Phase.RUNNING
    return is_over or container.running_id is not None or container.has_run
