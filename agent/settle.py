"""What must follow an answer or a refusal: patches of pods, releases of the lock, Events.

Nothing of it is stored. It follows from the rows on disk and from what the watches show, and is
derived again after each change, so a restart finds what the process before it still owed.
"""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import enum
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NoReturn

import msgspec
import structlog

from agent.cluster import (
    BIND_PHASE,
    MUTEX_LOCK,
    PHASE_FAILED,
    PHASE_SUCCESS,
    TO_ALLOCATE,
    NodeEvent,
    NodeLock,
    Phase,
    PodTable,
    PodUid,
    PodView,
    Role,
)
from agent.errors import ApiConflict, ApiError, ApiForbidden, ApiInvalid, ApiNotFound
from agent.hami.annotations import consume, read_lock
from agent.kit.cell import Cell, News
from agent.kit.tasks import Backoff
from agent.kit.timing import loop_time
from agent.ledger import Ledger, is_over
from agent.ports import Clock, NodeApi, PodApi

log = structlog.get_logger(__name__)

REJECTED = "UnexpectedAdmissionError"
"""The status.reason of a pod whose Allocate was answered with an error."""

QUIET = dt.timedelta(seconds=1)
"""After this time without another answer, the groups consumed so far are written to the pod."""

ANSWERED_GRACE = dt.timedelta(seconds=2)
"""How long a lock that no row notes may stay after the last answer to its owner."""

UNCLAIMED = dt.timedelta(seconds=30)
"""How long the agent must have seen a lock before it removes one whose owner is not here. The
scheduler takes the lock before it binds the pod, and its client queue can delay the bind."""

REFUSED_AT_ONCE = 32
"""Refused pods of one namespace that are settled at a time. One tenant can have thousands: a pod
that is bound without a scheduler stays when it is refused, and its controller makes the next."""

NOW = dt.datetime.min.replace(tzinfo=dt.UTC)  # an effect with this time is due at once
NOBODY = PodUid("")  # of an effect whose pod is not on this node
REFUSED_EVENT = "AllocationRefused"


class EffectKind(enum.StrEnum):
    """Effects that may follow an answer."""

    SETTLE_POD = "settle-pod"
    RELEASE_LOCK = "release-lock"


class Effect(msgspec.Struct, frozen=True):
    """What is owed to a pod or to the scheduler. `due`: not before this time.

    `lock`: the exact text of the lock to remove. Settle-pod does so after it gave the pod the
    `phase` (empty while containers are missing) and consumed the `groups` at these positions.
    """

    kind: EffectKind
    pod_uid: PodUid
    namespace: str
    pod: str
    due: dt.datetime = NOW
    phase: str = ""
    groups: tuple[int, ...] = ()
    lock: str = ""

    @property
    def place(self) -> tuple[EffectKind, PodUid]:
        """One effect of each place is under way at a time: two patches could change their order."""
        return self.kind, self.pod_uid

    @property
    def identity(self) -> tuple[EffectKind, PodUid, str]:
        """Effects of equal identity are tried again as one, at growing intervals."""
        return self.kind, self.pod_uid, self.lock


class SettlementFacts(msgspec.Struct, frozen=True):
    """What settlement reads. `standing`: how long this lock was seen without a gap in the pods."""

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


def pending_effects(facts: SettlementFacts) -> tuple[Effect, ...]:
    """All effects that are owed now."""
    if not facts.table.synced:
        return ()  # nothing proves that a pod is there, or is not
    found: dict[tuple[EffectKind, PodUid, str], Effect] = {}
    for effect in (*_for_answered(facts), *_for_refused(facts), *_for_lock(facts)):
        found.setdefault(effect.identity, effect)
    return tuple(found.values())


def _for_answered(facts: SettlementFacts) -> Iterator[Effect]:
    """Settle each pod that has rows, and remove the lock under which it was answered in full."""
    ledger, lock = facts.ledger, facts.lock
    noted = ledger.answered_under(lock.value) if lock else set()

    for uid, pod in facts.table.pods.items():
        rows = ledger.rows_of(uid)
        if not rows or pod.static or pod.terminal:
            continue  # the lock of a pod that has ended, or is gone: see _for_lock

        last = max(rows, key=lambda row: row.answered_at)
        is_complete = {row.key.container for row in rows} >= {
            container.name
            for container in pod.asking(last.resource)
            if not is_over(container, last.epoch)
        }
        # An answer in the future is old, because the clock was set back.
        is_young = dt.timedelta(0) <= facts.now - last.answered_at < QUIET
        due = last.answered_at + QUIET if is_young and not is_complete else NOW
        text = lock.value if lock and is_complete and uid in noted else ""
        where = uid, pod.namespace, pod.name, due

        if text and not pod.reusable_name:
            yield Effect(EffectKind.RELEASE_LOCK, *where, lock=text)
            text = ""

        # Otherwise another pod of this name may have taken over the lock. The patch of the pod has
        # the UID, so it fails in that case, and the lock stays.
        groups = tuple(sorted(row.group for row in rows))
        phase = PHASE_SUCCESS if is_complete else ""
        settle = Effect(EffectKind.SETTLE_POD, *where, phase, groups, text)
        if text or _changes(pod, settle):
            yield settle


def _for_refused(facts: SettlementFacts) -> Iterator[Effect]:
    begun: Counter[str] = Counter()
    for pod in facts.table.pods.values():
        is_noted = pod.annotations.get(BIND_PHASE) == PHASE_FAILED
        if pod.static or is_noted or not refusal_text(pod):
            continue
        begun[pod.namespace] += 1
        if begun[pod.namespace] <= REFUSED_AT_ONCE:
            where = pod.uid, pod.namespace, pod.name
            yield Effect(EffectKind.SETTLE_POD, *where, phase=PHASE_FAILED)


def _for_lock(facts: SettlementFacts) -> Iterator[Effect]:
    """Remove the lock of an owner that no longer needs it: answered in full, terminal, or gone.

    The lock has no UID, its time stamp has no fixed order to the pod's, and Pods and Node have
    separate watches. So a patch with the owner's UID shows that no other pod has the name, unless
    it is here and was answered under exactly this lock. If the owner is not here, or asks for no
    GPU of ours, the lock must have stood for UNCLAIMED: HAMi lets a pod take over the lock of a
    former pod of its name, and a pod that asks for no GPU may wait for another vendor's plugin.
    """
    lock = facts.lock
    if lock is None or lock.owner is None:
        return

    owner = facts.table.named(*lock.owner)
    answered = facts.ledger.answered_under(lock.value)
    has_stood = facts.standing >= UNCLAIMED
    if owner is None or not (owner.gpu_containers or owner.terminal):
        if facts.table.stale:
            return
        if has_stood:
            yield Effect(EffectKind.RELEASE_LOCK, NOBODY, *lock.owner, lock=lock.value)
        elif owner is None:
            # Its pod went while no agent ran: the patch with its UID shows whether the name is
            # free. If another pod has it, the patch fails for ever, and the lock goes by its age.
            for uid in answered:
                yield Effect(EffectKind.SETTLE_POD, uid, *lock.owner, lock=lock.value)
    elif owner.terminal or _is_answered(owner, facts):
        is_noted = owner.uid in answered and not owner.terminal
        kind = EffectKind.RELEASE_LOCK if is_noted else EffectKind.SETTLE_POD
        phase = PHASE_FAILED if refusal_text(owner) else ""
        yield Effect(kind, owner.uid, *owner.key, phase=phase, lock=lock.value)


def _is_answered(pod: PodView, facts: SettlementFacts) -> bool:
    """Whether no GPU container of the pod waits for an answer.

    A container that runs needs none: after a lost checkpoint the kubelet starts pods without an
    Allocate. But after a reboot the status is old, and the kubelet may be about to ask: so the lock
    must have stood for UNCLAIMED.
    """
    rows = {row.key.container: row for row in facts.ledger.rows_of(pod.uid)}
    last = max((row.answered_at for row in rows.values()), default=None)
    if last is not None and dt.timedelta(0) <= facts.now - last < ANSWERED_GRACE:
        return False
    # Ordinary init containers end before app containers.
    is_past = pod.phase is Phase.RUNNING
    has_stood = facts.standing >= UNCLAIMED
    return all(
        each.name in rows
        or (has_stood and (each.running_id is not None or each.has_run))
        or (has_stood and is_past and each.role is Role.INIT)
        for each in pod.gpu_containers
    )


def _changes(pod: PodView, effect: Effect) -> dict[str, str]:
    """The annotations that the effect gives to the pod and that it lacks."""
    wanted = {BIND_PHASE: effect.phase} if effect.phase else {}
    if TO_ALLOCATE in pod.annotations:
        wanted[TO_ALLOCATE] = consume(pod.annotations[TO_ALLOCATE], effect.groups)
    return {key: text for key, text in wanted.items() if pod.annotations.get(key) != text}


# Performs what is owed, and retries it until it is done.

PERIOD = 1.0
"""Seconds between two looks while the node is locked: the grace period ends without an event."""

DELAYS = (0.1, 0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
"""Seconds before each retry of an effect; the last one repeats."""

LOCK_DELAYS = (0.1, 0.5, 1.0, 2.0, 4.0)
"""The same for a lock: it must be free 5 s after the API server is back, jitter included."""

PARALLEL = 4
"""The most effects in flight. One place is for locks, which requests that hang must not delay."""

GRAIN = 0.001  # seconds; shorter waits count as 0


class _Attempt(msgspec.Struct, eq=False):
    """The last try of an effect. `until`: loop time of the next one; None: it is done."""

    effect: Effect
    backoff: Backoff
    until: float | None = None


@dataclasses.dataclass(eq=False, kw_only=True)
class Settlement:
    """Performs what is owed until the API server accepts it or can never accept it, locks first.

    When a pod has the note that it was refused, `say` gets an Event about it, which may be lost.
    """

    pods: Cell[PodTable]
    lock: Cell[str | None]
    ledger: Cell[Ledger]
    node_api: NodeApi
    pod_api: PodApi
    say: Callable[[NodeEvent], None]
    clock: Clock
    chance: random.Random

    def __post_init__(self) -> None:
        self._sighting: tuple[str, float] | None = None
        """A lock's text, and the loop time at which it was first seen with a current pod table."""
        self._tried: dict[tuple[EffectKind, PodUid, str], _Attempt] = {}
        self._active: set[tuple[EffectKind, PodUid]] = set()
        self._ended = Cell(0)
        """How many attempts have ended."""

    async def run(self) -> NoReturn:
        """Perform every effect when it is due, for ever."""
        news = News(self.pods, self.lock, self.ledger, self._ended)
        self._active.clear()  # an attempt that was cancelled before its first step left its place
        async with asyncio.TaskGroup() as group:
            while True:
                lock = read_lock(self.lock.value)
                waits = [] if lock is None else [PERIOD]
                # Locks first; what failed behind what was not tried yet.
                for effect in sorted(
                    self._open(lock), key=lambda each: (not each.lock, each.identity in self._tried)
                ):
                    most = PARALLEL if effect.lock else PARALLEL - 1
                    last = self._tried.get(effect.identity)
                    left = (effect.due - self.clock.now()).total_seconds()
                    if last and last.until:
                        left = max(left, last.until - loop_time())

                    if left > GRAIN:
                        waits.append(left)
                    elif len(self._active) < most and effect.place not in self._active:
                        self._active.add(effect.place)
                        group.create_task(self._perform(effect))

                await news.wait(min(waits, default=None))

    def _open(self, lock: NodeLock | None) -> list[Effect]:
        """What is owed and not done."""
        table = self.pods.value
        # The time of a lock restarts after a gap in the pod watch: an owner that was bound in the
        # gap is not in the table at once.
        if lock is None or table.stale or not table.synced:
            self._sighting = None
        elif self._sighting is None or self._sighting[0] != lock.value:
            self._sighting = lock.value, loop_time()

        stood = loop_time() - self._sighting[1] if self._sighting else 0.0
        standing, now = dt.timedelta(seconds=stood), self.clock.now()
        facts = SettlementFacts(table, self.ledger.value, lock, now, standing)
        found = pending_effects(facts)

        # A pod is settled once for each answer: who writes its annotations again is not fought.
        current = {each.identity for each in found}
        self._tried = {
            identity: last
            for identity, last in self._tried.items()
            if identity in current
            or (last.until is None and last.effect.groups and last.effect.pod_uid in table.pods)
        }
        # What is done is owed until the views show it. A removed lock is done for good: its pod may
        # go while a late view still shows it.
        done = [last.effect for last in self._tried.values() if last.until is None]
        removed = {each.identity for each in done if each.lock}
        return [each for each in found if each not in done and each.identity not in removed]

    async def _perform(self, effect: Effect) -> None:
        """Perform the effect, or drop it if it can never succeed. After a failure, try again."""
        last = self._tried.get(effect.identity)
        if last is None or last.until is None:
            delays = LOCK_DELAYS if effect.lock else DELAYS
            last = _Attempt(effect, Backoff(delays, 0.2, self.chance))

        until = None
        try:
            await self._attempt(effect)
        except ApiError as error:
            delay = max(last.backoff.next(), error.retry_after or 0.0)
            until = loop_time() + delay
            where = {"kind": effect.kind.value, "ns": effect.namespace, "pod": effect.pod}
            log.warning("settlement.put_off", **where, again_in=delay, err=str(error))
        finally:
            self._active.discard(effect.place)

        self._tried[effect.identity] = _Attempt(effect, last.backoff, until)
        if effect.kind is EffectKind.SETTLE_POD and until is None:
            # The same patch without the lock: the watch of the Node may be the quicker one.
            bare = msgspec.structs.replace(effect, lock="")
            self._tried[bare.identity] = _Attempt(bare, last.backoff)

        self._ended.set(self._ended.value + 1)

    async def _attempt(self, effect: Effect) -> None:
        """Patch the pod, then remove its lock. Raises ApiError: it must be tried again."""
        if effect.kind is EffectKind.SETTLE_POD:
            if not await self._patch(effect) or not effect.lock:
                return
        elif effect.pod_uid == NOBODY:
            owner = shown = self.pods.value.named(effect.namespace, effect.pod)
            # A node's identity may not read a pod that is gone or not bound to it yet.
            with contextlib.suppress(ApiForbidden):
                owner = shown or await self.pod_api.get_pod(effect.namespace, effect.pod)
            # A shown pod that asks for no GPU of ours is why the lock goes: see _for_lock.
            if owner is not None and not owner.terminal and (owner.gpu_containers or not shown):
                raise ApiError(f"pod {effect.namespace}/{effect.pod} is on this node by now")

        # Without the Node (404), or with another text or none (422), nothing is left to do.
        with contextlib.suppress(ApiInvalid, ApiNotFound):
            await self.node_api.release_lock(MUTEX_LOCK, effect.lock)
            log.info("lock.released", ns=effect.namespace, pod=effect.pod)

    async def _patch(self, effect: Effect) -> bool:
        """Patch the pod once: remove the consumed groups, set the phase.

        If the effect has a lock, the pod is patched even if nothing changes. Returns whether that
        proves that the name belongs to its UID or to no pod, so that the lock is not another pod's.
        """
        pod = self.pods.value.pods.get(effect.pod_uid)
        changes = {} if pod is None else _changes(pod, effect)
        try:
            await self.pod_api.annotate_pod(effect.namespace, effect.pod, effect.pod_uid, changes)
        except (ApiNotFound, ApiInvalid, ApiConflict, ApiForbidden) as error:
            if effect.lock and isinstance(error, ApiNotFound):
                return True
            # Is the pod gone? A 422 comes for another UID and from a webhook, a 403 for a pod on
            # another node and for a missing right, a 409 also from a concurrent write. So the pod
            # table decides. What is refused while it shows the pod may be allowed later.
            if self.pods.value.synced and effect.pod_uid not in self.pods.value.pods:
                return False
            raise

        if pod is not None and changes.get(BIND_PHASE) == PHASE_FAILED:
            where = pod.namespace, pod.name, pod.uid
            self.say(NodeEvent(REFUSED_EVENT, refusal_text(pod), True, *where))

        return True
