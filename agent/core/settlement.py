"""What must follow what happened: effects owed for rejected pods and for locks left over."""

import dataclasses
import datetime as dt

from agent.core.annotations import BIND_PHASE, BIND_TIME, PHASE_FAILED
from agent.core.ledger import Effect, EffectKind, Ledger
from agent.core.pods import (
    ContainerView,
    NodeLock,
    Phase,
    PodTable,
    PodUid,
    PodView,
    Role,
)

REJECTED = "UnexpectedAdmissionError"
"""status.reason that the kubelet gives a pod whose Allocate was answered with an error."""

ANSWERED_GRACE = dt.timedelta(seconds=2)
"""How long a lock may outlive the last answer to its owner: the outbox is usually faster."""

GRAVE_PATIENCE = dt.timedelta(seconds=2)
"""How long the lock of a deleted pod must have stood before our eyes.

bind-time has whole seconds, and a tenant can write it: the lock can be that of the pod's successor
of the same name, which is bound within 2 s of its lock, and then is seen to be the owner.
"""

STARTED_PATIENCE = dt.timedelta(seconds=30)
"""The same for an owner that runs without an answer: after a reboot its status is old, and the
kubelet may be about to ask for it."""

LOCK_TIMEOUT = dt.timedelta(seconds=300)
"""Age at which HAMi's scheduler itself takes a lock for abandoned (its --node-lock-timeout)."""

BIND_PATIENCE = dt.timedelta(seconds=180)
"""How long a young lock without an owner must have stood before our eyes.

The scheduler takes the lock before it binds, so the owner of a fresh one is not seen yet. A bind
lasts up to 30 s (the scheduler's own timeout), and a watch of the pods that has died in silence
passes for alive for up to 150 s: after both, an owner that was bound would be in the table.
"""

OVERDUE_PATIENCE = dt.timedelta(seconds=10)
"""The same for a lock that is over LOCK_TIMEOUT by its stamp.

It is longer than the 2 s between lock and bind, for the stamp is another machine's and our own
clock may be wrong: an old stamp alone never costs a pod its lock.
"""

NOBODY = PodUid("")
"""In an effect: the pod's UID is not known, for it was never seen."""

REFUSED_EVENT = "AllocationRefused"


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """What settlement looks at.

    `standing`: for how long, by our own measure, this very lock was there while the table was
    followed without a break.
    """

    table: PodTable
    ledger: Ledger
    lock: NodeLock | None
    now: dt.datetime
    standing: dt.timedelta = dt.timedelta(0)


def refusal_text(pod: PodView) -> str:
    """The agent's own sentence in the status of a pod that it refused, or nothing."""
    if pod.phase is not Phase.FAILED or pod.reason != REJECTED or "[HA-" not in pod.message:
        return ""
    _, found, text = pod.message.partition("desc = ")
    sentence, bracket, rest = (text if found else pod.message).partition("[HA-")
    return f"{sentence}{bracket}{rest.partition(']')[0]}]"


def owed(scene: Scene) -> tuple[Effect, ...]:
    """All effects that the present calls for; those already in the outbox are left out."""
    effects = [*_for_rejected(scene), *_for_lock(scene)]
    known = {effect.identity for effect in scene.ledger.outbox}
    return tuple(effect for effect in effects if effect.identity not in known)


def _for_rejected(scene: Scene) -> list[Effect]:
    """A pod that the kubelet reports as refused by us is settled as failed, and told why."""
    effects: list[Effect] = []
    for pod in scene.table.pods.values():
        text = refusal_text(pod)
        if not text or pod.static or pod.annotations.get(BIND_PHASE) == PHASE_FAILED:
            continue
        settle = _effect(EffectKind.SETTLE_POD, pod, scene.now)
        effects.append(dataclasses.replace(settle, phase=PHASE_FAILED))
        event = _effect(EffectKind.POST_EVENT, pod, scene.now)
        effects.append(dataclasses.replace(event, reason=REFUSED_EVENT, value=text))
    return effects


def _effect(kind: EffectKind, pod: PodView, due: dt.datetime) -> Effect:
    return Effect(kind=kind, pod_uid=pod.uid, namespace=pod.namespace, pod=pod.name, due=due)


def _for_lock(scene: Scene) -> list[Effect]:
    """The lock of an owner that needs it no more: terminal, gone, or answered in full.

    Pods and Node are watched apart, so either view may be late: only a pod that was bound under
    this very lock is taken for its owner, never an older or a younger one of the same name.
    """
    lock = scene.lock
    if lock is None or lock.owner is None or not scene.table.synced:
        return []
    owner = scene.table.named(*lock.owner)
    if owner is not None and _took(owner, lock):
        over = owner.terminal or _answered(owner, scene)
        return [_release(owner, lock, scene.now)] if over else []
    for stone in scene.table.tombstones:
        if stone.pod.key == lock.owner and _took(stone.pod, lock):
            is_old = scene.standing >= GRAVE_PATIENCE
            return [_release(stone.pod, lock, scene.now)] if is_old else []
    if owner is None or owner.terminal or not owner.gpu_containers:
        return [_abandoned(lock, scene.now)] if _is_abandoned(lock, scene) else []
    return []


def _is_abandoned(lock: NodeLock, scene: Scene) -> bool:
    """Whether the owner, who is not there, was deleted where nobody saw it: the agent was down.

    A pod of its name that can wait for no answer is no owner either. Rows of the owner's name prove
    nothing: a StatefulSet's next pod has the name of the last one, whose rows stay for a minute,
    and takes its lock before it is seen.
    """
    if scene.table.stale:
        return False
    overdue = scene.now - lock.stamp >= LOCK_TIMEOUT
    return scene.standing >= (OVERDUE_PATIENCE if overdue else BIND_PATIENCE)


def _abandoned(lock: NodeLock, now: dt.datetime) -> Effect:
    return Effect(
        kind=EffectKind.RELEASE_LOCK,
        pod_uid=NOBODY,
        namespace=lock.namespace,
        pod=lock.name,
        due=now,
        value=lock.value,
    )


def _release(owner: PodView, lock: NodeLock, now: dt.datetime) -> Effect:
    effect = _effect(EffectKind.RELEASE_LOCK, owner, now)
    return dataclasses.replace(effect, value=lock.value)


def _took(pod: PodView, lock: NodeLock) -> bool:
    """Whether the lock was taken for this pod and not for a later one of the same name.

    bind-time and the lock's stamp come from the same writer, the scheduler, which stamps the lock
    first; our own clock is never compared with either.
    """
    try:
        bound = int(pod.annotations.get(BIND_TIME, ""))
    except ValueError:
        return False
    return lock.stamp.timestamp() <= bound


def _answered(pod: PodView, scene: Scene) -> bool:
    """Whether no GPU container of the pod waits for an answer, for a while now.

    One that runs needs none: a kubelet that has lost its checkpoint, and meets its plugin later,
    starts pods without asking. An answer from the future is an old one: the clock was set back.
    """
    rows = {row.key.container: row for row in scene.ledger.rows_of(pod.uid)}
    if not pod.gpu_containers:
        return False
    unanswered = [one for one in pod.gpu_containers if one.name not in rows]
    if unanswered and scene.standing < STARTED_PATIENCE:
        return False
    if not all(_has_started(pod, one) for one in unanswered):
        return False
    last = max((row.answered_at for row in rows.values()), default=None)
    return last is None or not dt.timedelta(0) <= scene.now - last < ANSWERED_GRACE


def _has_started(pod: PodView, container: ContainerView) -> bool:
    """Whether the container runs, or has run: an ordinary init container ends before the others."""
    is_over = container.role is Role.INIT and pod.phase is Phase.RUNNING
    return is_over or container.running_id is not None or container.has_run
