"""What must follow what happened: effects owed for rejected pods and for locks left over."""

import dataclasses
import datetime as dt
from collections import Counter
from collections.abc import Iterator

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
"""status.reason that the kubelet gives a pod whose Allocate was answered with an error."""

ANSWERED_GRACE = dt.timedelta(seconds=2)
"""How long a lock may outlive the last answer to its owner: the outbox is usually faster."""

UNCLAIMED = dt.timedelta(seconds=30)
"""How long a lock must have stood before our eyes that nobody of its name waits for.

The scheduler takes the lock before it binds, and its own queue may lie between, so the owner of a
fresh one is not seen yet.
"""

REFUSED_AT_ONCE = 32
"""Refused pods of one namespace to which something is owed at a time; the others come behind them.
A pod that is bound to the node without a scheduler stays when it was refused, and its controller
makes the next one: there can be thousands, of one tenant, and all that is owed is gone through at
each news."""

NOBODY = PodUid("")
"""In an effect: the pod's UID is not known, for it is not here."""

REFUSED_EVENT = "AllocationRefused"


@dataclasses.dataclass(frozen=True, slots=True)
class SettlementFacts:
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


def event_of(effect: Effect) -> NodeEvent:
    """The Event that is owed to a pod."""
    return NodeEvent(
        reason=effect.reason,
        text=effect.value,
        warning=True,
        namespace=effect.namespace,
        pod=effect.pod,
        pod_uid=effect.pod_uid,
    )


def owed(scene: SettlementFacts) -> tuple[Effect, ...]:
    """All effects that the present calls for, by the views alone: a restart finds them again."""
    return (*_for_rejected(scene), *_for_lock(scene))


def _for_rejected(scene: SettlementFacts) -> Iterator[Effect]:
    """A pod that the kubelet reports as refused by us is settled as failed, and told why."""
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
    """The lock of an owner that needs it no more: answered in full, terminal, or gone.

    The lock names no UID, no order holds between its stamp and anything on the pod, and Pods and
    Node are watched apart. So its exact text tells whose it is where a pod that is here was
    answered under it. Of any other owner that is here, a patch with its UID shows that no other pod
    has the name yet. Of one that is not, the lock must have stood for so long that whoever took it
    would be here: HAMi lets a pod take over the lock of one that had its name, as it is. So it must
    for one that asks us for nothing: it may wait for the plugin of another vendor.
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
    """The same for a lock that names a pod that is here."""
    if not owner.terminal:
        if not _answered(owner, scene):
            return ()
        if _is_noted(lock, owner, scene):
            return (_release(lock, owner.uid, scene.now),)
    phase = PHASE_FAILED if refusal_text(owner) else ""
    return (_effect(EffectKind.SETTLE_POD, owner, scene.now, phase=phase, value=lock.value),)


def _is_noted(lock: NodeLock, owner: PodView, scene: SettlementFacts) -> bool:
    """Whether this very lock is the one under which the pod was answered."""
    return any(row.lock == lock.value for row in scene.ledger.rows_of(owner.uid))


def _release(lock: NodeLock, uid: PodUid, now: dt.datetime) -> Effect:
    return Effect(EffectKind.RELEASE_LOCK, uid, lock.namespace, lock.name, now, value=lock.value)


def _answered(pod: PodView, scene: SettlementFacts) -> bool:
    """Whether no GPU container of the pod waits for an answer, for a while now.

    One that runs needs none: a kubelet that has lost its checkpoint, and meets its plugin later,
    starts pods without asking; for a while, for after a reboot its status is old, and the kubelet
    may be about to ask. An answer from the future is an old one: the clock was set back.
    """
    rows = {row.key.container: row for row in scene.ledger.rows_of(pod.uid)}
    unanswered = [one for one in pod.gpu_containers if one.name not in rows]
    if unanswered and scene.standing < UNCLAIMED:
        return False
    if not all(_has_started(pod, one) for one in unanswered):
        return False
    last = max((row.answered_at for row in rows.values()), default=None)
    return last is None or not dt.timedelta(0) <= scene.now - last < ANSWERED_GRACE


def _has_started(pod: PodView, container: ContainerView) -> bool:
    """Whether the container runs, or has run: an ordinary init container ends before the others."""
    is_over = container.role is Role.INIT and pod.phase is Phase.RUNNING
    return is_over or container.running_id is not None or container.has_run
