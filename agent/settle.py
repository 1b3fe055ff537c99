"""What must follow an answer: patches of pods, releases of the lock, Events."""

import asyncio
import datetime as dt
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import NoReturn

import msgspec
import structlog

from agent.cluster import (
    BIND_PHASE,
    MUTEX_LOCK,
    PHASE_FAILED,
    PHASE_SUCCESS,
    TO_ALLOCATE,
    ContainerView,
    NodeEvent,
    NodeLock,
    NodeView,
    Phase,
    PodTable,
    PodUid,
    PodView,
    Role,
)
from agent.errors import (
    ApiConflict,
    ApiError,
    ApiForbidden,
    ApiInvalid,
    ApiNotFound,
    ApiThrottled,
    StateError,
)
from agent.hami.pod import consume, held_lock
from agent.kit.cell import Cell, News
from agent.kit.tasks import Allowance, Backoff
from agent.kit.timing import Tally
from agent.ledger import Effect, EffectKind, Ledger
from agent.ports import Clock, NodeApi, PodApi

# Finds the effects that are owed: for rejected pods and left-over node locks.

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


# Performs single effects at the API server.

log = structlog.get_logger(__name__)

OUTLIVED = 64
"""How many locks are remembered whose pod went first; as many as NodeView.former_locks has."""


class Acts:
    """Performs effects. Sole writer of `outlived` (see OutboxViews)."""

    def __init__(
        self,
        nodes: NodeApi,
        pods: PodApi,
        table: Cell[PodTable],
        outlived: Cell[Mapping[str, PodUid]],
    ) -> None:
        self._nodes, self._pods = nodes, pods
        self._table = table
        self._outlived = outlived

    async def perform(self, effect: Effect) -> str:
        """Perform the effect. Returns the result for the metric. Raises ApiError."""
        match effect.kind:
            case EffectKind.RELEASE_LOCK:
                await self._require_unclaimed(effect)
                await self._release(effect)
            case EffectKind.SETTLE_POD:
                return await self._settle(effect)
            case EffectKind.POST_EVENT:
                await self._pods.post_event(event_of(effect))
        return "done"

    async def _settle(self, effect: Effect) -> str:
        """Patch the pod once (remove the consumed groups, set the phase), then release its lock.

        If the effect has a lock, the pod is patched even if nothing changes. The patch proves that
        the name still belongs to its UID or to no pod, so that the lock is not another pod's.
        """
        pod = self._table.value.pods.get(effect.pod_uid)
        is_over = pod is None or (pod.terminal and effect.phase == PHASE_SUCCESS)
        changes = {} if pod is None or is_over else _changes(pod, effect)
        if not effect.value and (is_over or not changes):
            return "dropped" if is_over else "unchanged"
        was_here = True
        try:
            await self._pods.annotate_pod(effect.namespace, effect.pod, effect.pod_uid, changes)
        except ApiNotFound:
            if not effect.value:
                raise
            was_here = False
        if effect.value:
            await self._release(effect)
            if was_here:
                await self._look_again(effect)
        return "done"

    async def _require_unclaimed(self, effect: Effect) -> None:
        """Raise ApiError if the owner of a lock that seemed to be nobody's is here after all."""
        if effect.pod_uid:
            return
        shown = self._table.value.named(effect.namespace, effect.pod)
        owner = shown or await self._get(effect)
        # A shown pod that asks for no GPU of ours is why the lock goes: see settlement.
        if owner is not None and not owner.terminal and (owner.gpu_containers or not shown):
            raise ApiError(f"pod {effect.namespace}/{effect.pod} is on this node by now")

    async def _look_again(self, effect: Effect) -> None:
        """Remember the lock if its pod was deleted since the patch.

        The next pod of that name may have taken the lock meanwhile. A pod that was deleted before
        the patch does not matter: a tenant can replace an answered pod at any time.
        """
        try:
            pod = await self._get(effect)
        except ApiError as error:
            log.warning("lock.owner_unknown", ns=effect.namespace, pod=effect.pod, err=str(error))
            return
        if pod is None or pod.uid != effect.pod_uid:
            noted = {**self._outlived.value, effect.value: effect.pod_uid}
            self._outlived.set(dict(list(noted.items())[-OUTLIVED:]))

    async def _get(self, effect: Effect) -> PodView | None:
        """The pod of that name as it is now. Raises ApiError."""
        try:
            return await self._pods.get_pod(effect.namespace, effect.pod)
        except ApiForbidden:
            return None  # a node's identity may not read a pod that is gone or not bound to it yet

    async def _release(self, effect: Effect) -> None:
        """Remove the lock if it still has this text."""
        await self._nodes.release_lock(MUTEX_LOCK, effect.value)
        log.info("lock.released", ns=effect.namespace, pod=effect.pod)


def _changes(pod: PodView, effect: Effect) -> dict[str, str | None]:
    """The annotations of the pod that the effect has to change."""
    changes: dict[str, str | None] = {}
    text = pod.annotations.get(TO_ALLOCATE)
    if effect.groups and text is not None:
        consumed = consume(text, effect.groups)
        if consumed != text:
            changes[TO_ALLOCATE] = consumed
    if effect.phase and pod.annotations.get(BIND_PHASE) != effect.phase:
        changes[BIND_PHASE] = effect.phase
    return changes


# Settlement: derives the effects that the pods and the node lock call for.

PERIOD = 1.0
"""Seconds between two runs while the node is locked: the grace period ends without an event."""


class _Sighting(msgspec.Struct, frozen=True):
    """A lock's text, and the loop time at which it was first seen with a current pod table."""

    value: str
    at: float


class Settlement:
    """Sole writer of `owed`: the effects that pods and lock call for, for the outbox to perform.

    They are derived from the views and not written to disk, so a full disk does not keep a lock.
    """

    def __init__(
        self,
        *,
        pods: Cell[PodTable],
        node: Cell[NodeView | None],
        ledger: Cell[Ledger],
        owed: Cell[tuple[Effect, ...]],
        clock: Clock,
    ) -> None:
        self._pods = pods
        self._node = node
        self._ledger = ledger
        self._owed = owed
        self._clock = clock
        self._sighting: _Sighting | None = None

    async def run(self) -> NoReturn:
        """Derive effects after each change of pods, Node or ledger; each second while locked."""
        news = News(self._pods, self._node, self._ledger)
        while True:
            self._look()
            locked = held_lock(self._node.value) is not None
            await news.wait(PERIOD if locked else None)

    def _look(self) -> None:
        before = {effect.identity: effect for effect in self._owed.value}
        # What was owed already keeps its due time.
        now = tuple(before.get(effect.identity, effect) for effect in owed(self._scene()))
        for effect in now:
            if effect.identity not in before:
                log.info(
                    "settlement.owed", kind=effect.kind.value, ns=effect.namespace, pod=effect.pod
                )
        self._owed.set(now)

    def _scene(self) -> SettlementFacts:
        table, lock = self._pods.value, held_lock(self._node.value)
        standing = self._standing(lock, table)
        return SettlementFacts(table, self._ledger.value, lock, self._clock.now(), standing)

    def _standing(self, lock: NodeLock | None, table: PodTable) -> dt.timedelta:
        """How long this lock has been seen. The time restarts after a gap in the pod watch.

        After the gap, an owner that was bound during it is not in the table at once.
        """
        if lock is None or table.stale or not table.synced:
            self._sighting = None
            return dt.timedelta(0)
        now = asyncio.get_running_loop().time()
        if self._sighting is None or self._sighting.value != lock.value:
            self._sighting = _Sighting(lock.value, now)
        return dt.timedelta(seconds=now - self._sighting.at)


# The outbox: performs effects that follow an answer, and retries them until done, across restarts.
#
# - It performs the effects in the ledger, and those that settlement derives from the views, which
#   are not on disk.
# - Locks come first, because the scheduler waits for them.
# - An effect on a lock or a pod is done when the API server accepted it or can never accept it.
# - Events may be lost. They are dropped when they are refused, older than 1 h, or more than 64.

DELAYS = (0.1, 0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
"""Seconds before each retry of an effect; the last one repeats."""

LOCK_DELAYS = (0.1, 0.5, 1.0, 2.0, 4.0)
"""The same for a lock. Until a lock is free, the scheduler places nothing on this node. It must be
free 5 s after the API server is back, jitter included."""

PARALLEL = 4
"""The most effects in flight. One place is reserved for locks, so that requests for pods that hang
do not delay locks."""

GRAIN = 0.001
"""Seconds; shorter waits count as 0."""

HORIZON = dt.timedelta(seconds=5)
"""No effect is due later than this. A later due time was set before the clock was set back."""

EVENTS = 64
"""The most Events that may wait; older ones are dropped."""

DROP_PAUSE = 5.0
"""Seconds after a failed write before dropping Events is tried again."""

EVENT_LIFE = dt.timedelta(hours=1)
"""An Event that could not be posted for this long is dropped."""

WARN_PERIOD = 60.0
"""Seconds between two warnings about dropped Events with the same reason."""

REFUSED = 220
REFUSED_REFILL = 2.0
"""Allowance for patches of refused pods without a lock: 220 at once, which is twice the pods of a
kubelet, then one every 2 s. A tenant can cause them without end, and nothing waits for them."""

Identity = tuple[object, ...]
"""Identifies an effect, which is in flight at most once."""


class OutboxViews(msgspec.Struct, frozen=True):
    """The cells that the outbox follows. `found`: the effects that settlement derives.

    The outbox writes `outlived`: locks, each with the UID of its answered pod, that were still held
    when that pod was deleted.
    """

    ledger: Cell[Ledger]
    pods: Cell[PodTable]
    found: Cell[tuple[Effect, ...]]
    outlived: Cell[Mapping[str, PodUid]]


class _Trouble(msgspec.Struct, eq=False):
    """The retry state of an effect that failed. `until`: loop time of the next try.

    `performed`: the effect, if it was performed and only its removal from the ledger failed.
    """

    backoff: Backoff
    until: float = 0.0
    performed: Effect | None = None


class Outbox:
    """Performs the effects that are owed. `commit` changes the ledger."""

    def __init__(
        self,
        *,
        views: OutboxViews,
        nodes: NodeApi,
        pods: PodApi,
        commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]],
        clock: Clock,
        random: random.Random,
    ) -> None:
        self._views = views
        self._acts = Acts(nodes, pods, views.pods, views.outlived)
        self._commit = commit
        self._clock = clock
        self._random = random
        self._trouble: dict[Identity, _Trouble] = {}
        self._done: frozenset[Identity] = frozenset()
        """Effects derived by settlement that are done, until the views show it."""
        self._active: Cell[frozenset[Identity]] = Cell(frozenset())
        self._leaving: Cell[frozenset[Identity]] = Cell(frozenset())
        self._drop_at = 0.0
        self._ration = Allowance(REFUSED, REFUSED_REFILL)
        self._warned: dict[str, float] = {}
        self.results = Tally(
            "outbox_effects_total",
            "Effects that followed an answer, by kind and result.",
            ("kind", "result"),
        )

    async def run(self) -> NoReturn:
        """Perform every effect when it is due."""
        views = self._views
        news = News(views.ledger, views.pods, views.found, self._active, self._leaving)
        async with asyncio.TaskGroup() as group:
            while True:
                self._done &= {effect.identity for effect in views.found.value}
                if excess := self._excess():
                    self._leaving.set(frozenset(effect.identity for effect in excess))
                    group.create_task(self._drop(excess))
                for effect in self._due():
                    if self._has_place(effect) and self._left(effect) <= GRAIN:
                        if _is_rationed(effect):
                            self._ration.spend(asyncio.get_running_loop().time())
                        self._active.set(self._active.value | {effect.identity})
                        group.create_task(self._perform(effect))
                await news.wait(self._until_next())

    def _has_place(self, effect: Effect) -> bool:
        """Whether the effect may start now; one place is reserved for locks."""
        return len(self._active.value) < (PARALLEL if effect.frees_lock else PARALLEL - 1)

    def _owed(self) -> list[Effect]:
        """All effects that are owed and not known to be done."""
        owed = list(self._views.ledger.value.outbox)
        known = {effect.identity for effect in owed} | self._done
        return owed + [each for each in self._views.found.value if each.identity not in known]

    def _open(self) -> list[Effect]:
        """The effects that are not in flight and that the views allow to perform."""
        synced = self._views.pods.value.synced
        taken = self._active.value | self._leaving.value
        return [
            effect
            for effect in self._owed()
            if effect.identity not in taken and (synced or effect.kind is not EffectKind.SETTLE_POD)
        ]

    def _due(self) -> list[Effect]:
        """The effects to try now: locks first, Events last."""
        due = [effect for effect in self._open() if self._left(effect) <= GRAIN]
        return sorted(
            due, key=lambda each: (not each.frees_lock, each.kind is EffectKind.POST_EVENT)
        )

    def _excess(self) -> list[Effect]:
        """The oldest Events beyond EVENTS; none while others are being dropped."""
        if self._leaving.value or self._drop_at > asyncio.get_running_loop().time():
            return []
        surplus = sum(effect.kind is EffectKind.POST_EVENT for effect in self._owed()) - EVENTS
        if surplus <= 0:
            return []
        events = [effect for effect in self._open() if effect.kind is EffectKind.POST_EVENT]
        return events[:surplus]

    async def _drop(self, excess: list[Effect]) -> None:
        """Remove these from the ledger in one commit."""
        try:
            await self._commit(lambda ledger: ledger.done(*excess))
            self._mark_done(*excess)
        except StateError as error:
            self._drop_at = asyncio.get_running_loop().time() + DROP_PAUSE
            log.warning("outbox.not_dropped", count=len(excess), err=str(error))
        else:
            self.results.add(EffectKind.POST_EVENT.value, "dropped", amount=len(excess))
            self._warn("", count=len(excess), err=f"more than {EVENTS} Events wait")
            self._forget()
        finally:
            self._leaving.set(frozenset())

    def _left(self, effect: Effect) -> float:
        """Seconds until the effect may be performed."""
        trouble = self._trouble.get(effect.identity)
        now = asyncio.get_running_loop().time()
        pause = trouble.until - now if trouble else 0.0
        if _is_rationed(effect):
            pause = max(pause, self._ration.wait(now))
        wait = effect.due - self._clock.now()
        return max(pause, wait.total_seconds() if wait <= HORIZON else 0.0)

    def _until_next(self) -> float | None:
        """Seconds until the next effect is due; None: only a change of the views makes one due."""
        waits = [left for effect in self._open() if (left := self._left(effect)) > GRAIN]
        return min(waits, default=None)

    async def _perform(self, effect: Effect) -> None:
        try:
            await self._try(effect)
        finally:
            self._active.set(self._active.value - {effect.identity})

    async def _try(self, effect: Effect) -> None:
        trouble = self._trouble.get(effect.identity)
        if trouble is None or trouble.performed != effect:
            try:
                result = await self._result(effect)
            except ApiError as error:
                self._put_off(effect, error)
                return
            self.results.add(effect.kind.value, result)
        self._mark_done(effect)
        if effect not in self._views.ledger.value.outbox:
            self._forget()
            return
        try:
            await self._commit(lambda ledger: ledger.done(effect))
        except StateError as error:
            self._put_off(effect, error).performed = effect
        else:
            self._forget()

    def _mark_done(self, *effects: Effect) -> None:
        found = {effect.identity for effect in self._views.found.value}
        self._done |= found.intersection(effect.identity for effect in effects)

    def _forget(self) -> None:
        """Forget the retry state of effects that are no longer owed."""
        owed = {effect.identity for effect in self._owed()}
        for identity in self._trouble.keys() - owed:
            del self._trouble[identity]

    async def _result(self, effect: Effect) -> str:
        """Perform the effect, or drop it if it can never succeed. Raises ApiError: try again."""
        try:
            return await self._acts.perform(effect)
        except ApiNotFound:
            return "dropped"  # the pod or the Node is gone
        except ApiInvalid as error:
            log.info("outbox.invalid", kind=effect.kind.value, pod=effect.pod, err=str(error))
            # The lock is gone or has another text; or the pod of that name has another UID.
            return "not-ours" if effect.frees_lock else "dropped"
        except ApiError as error:
            if isinstance(error, ApiConflict | ApiForbidden) and self._is_of_gone_pod(effect):
                return "dropped"
            if not self._is_in_vain(effect, error):
                raise
            self._warn(effect.reason, pod=effect.pod, err=str(error))
            return "dropped"

    def _is_of_gone_pod(self, effect: Effect) -> bool:
        """Whether a 409 or 403 means that the pod of the effect is gone.

        A 403 also comes for a pod on another node, a 409 also from a concurrent write. So the pod
        table decides.
        """
        table = self._views.pods.value
        is_gone = table.synced and effect.pod_uid not in table.pods
        return is_gone and effect.kind is EffectKind.SETTLE_POD

    def _is_in_vain(self, effect: Effect, error: ApiError) -> bool:
        """Whether to give up the effect: only an Event that is refused or too old."""
        if effect.kind is not EffectKind.POST_EVENT:
            return False
        is_refused = 400 <= error.status < 500 and not isinstance(error, ApiThrottled)
        return is_refused or self._clock.now() - effect.due > EVENT_LIFE

    def _warn(self, reason: str, **fields: object) -> None:
        """Log at most one warning per reason and WARN_PERIOD."""
        elapsed = asyncio.get_running_loop().time()
        if elapsed - self._warned.get(reason, -WARN_PERIOD) >= WARN_PERIOD:
            self._warned[reason] = elapsed
            log.warning("outbox.event_dropped", reason=reason, **fields)

    def _put_off(self, effect: Effect, error: ApiError | StateError) -> _Trouble:
        delays = LOCK_DELAYS if effect.frees_lock else DELAYS
        trouble = self._trouble.setdefault(
            effect.identity, _Trouble(Backoff(delays, 0.2, self._random))
        )
        delay = trouble.backoff.next()
        if isinstance(error, ApiError):
            delay = max(delay, error.retry_after or 0.0)
        trouble.until = asyncio.get_running_loop().time() + delay
        self.results.add(effect.kind.value, "failed")
        log.warning(
            "outbox.put_off", kind=effect.kind.value, pod=effect.pod, again_in=delay, err=str(error)
        )
        return trouble


def _is_rationed(effect: Effect) -> bool:
    """Whether the effect only notes a refusal on a pod and has no lock."""
    is_settled = effect.kind is EffectKind.SETTLE_POD and not effect.value
    return is_settled and effect.phase == PHASE_FAILED
