"""What must follow an answer or a refusal: patches of pods, releases of the lock, Events.

Nothing of it is stored. It follows from the rows on disk and from what the watches show, and is
derived again after each change, so a restart finds what the process before it still owed.
"""

import asyncio
import datetime as dt
import enum
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
)
from agent.hami.pod import consume, held_lock
from agent.kit.cell import Cell, News
from agent.kit.tasks import Allowance, Backoff
from agent.kit.timing import Tally
from agent.ledger import Decider, Ledger, is_over, mismatch
from agent.ports import Clock, NodeApi, PodApi

log = structlog.get_logger(__name__)

REJECTED = "UnexpectedAdmissionError"
"""The status.reason of a pod whose Allocate was answered with an error."""

QUIET = dt.timedelta(seconds=1)
"""After this time without another answer, the groups consumed so far are written to the pod."""

ANSWERED_GRACE = dt.timedelta(seconds=2)
"""How long a lock that no row notes may stay after the last answer to its owner."""

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
MISMATCH_EVENT = "SliceMismatch"


class EffectKind(enum.StrEnum):
    """Effects that may follow an answer."""

    SETTLE_POD = "settle-pod"
    RELEASE_LOCK = "release-lock"


class Effect(msgspec.Struct, frozen=True):
    """What is owed to a pod or to the scheduler. `due`: not before this time.

    - settle-pod: `phase` (success, failed, or empty while containers are missing) and `groups` (the
      consumed positions) for the pod; `lock`: the exact text of a lock to remove afterwards.
    - release-lock: `lock` is the exact text.
    """

    kind: EffectKind
    pod_uid: PodUid
    namespace: str
    pod: str
    due: dt.datetime
    phase: str = ""
    groups: tuple[int, ...] = ()
    lock: str = ""

    @property
    def frees_lock(self) -> bool:
        """Whether it removes a lock, for which the scheduler waits."""
        return bool(self.lock)

    @property
    def identity(self) -> tuple[EffectKind, PodUid, str]:
        """Effects of equal identity are tried again as one, at growing intervals."""
        return self.kind, self.pod_uid, self.lock

    @property
    def place(self) -> tuple[EffectKind, PodUid, str]:
        """What is in flight once at most. Two patches of a pod could arrive in the other order."""
        return self.kind, self.pod_uid, "" if self.kind is EffectKind.SETTLE_POD else self.lock

    @property
    def is_rationed(self) -> bool:
        """Whether it only notes a refusal on a pod and has no lock: see REFUSED."""
        return self.phase == PHASE_FAILED and not self.lock


class SettlementFacts(msgspec.Struct, frozen=True):
    """The facts that settlement reads.

    `standing`: for how long the agent has seen this lock while it followed the pods without a gap.
    `tried`: pods of which a patch was tried; it failed, or no watch shows it yet.
    """

    table: PodTable
    ledger: Ledger
    lock: NodeLock | None
    now: dt.datetime
    standing: dt.timedelta = dt.timedelta(0)
    tried: frozenset[PodUid] = frozenset()


def refusal_text(pod: PodView) -> str:
    """The agent's refusal in the status of a pod; empty: the agent did not refuse the pod."""
    if pod.phase is not Phase.FAILED or pod.reason != REJECTED or "[HA-" not in pod.message:
        return ""
    _, found, text = pod.message.partition("desc = ")
    sentence, bracket, rest = (text if found else pod.message).partition("[HA-")
    return f"{sentence}{bracket}{rest.partition(']')[0]}]"


def owed(facts: SettlementFacts) -> tuple[Effect, ...]:
    """All effects that are owed now."""
    if not facts.table.synced:
        return ()  # nothing proves that a pod is there, or is not
    found: dict[tuple[object, ...], Effect] = {}
    for effect in (*_for_answered(facts), *_for_refused(facts), *_for_lock(facts)):
        found.setdefault(effect.identity, effect)
    return tuple(found.values())


def _for_answered(facts: SettlementFacts) -> Iterator[Effect]:
    """Settle each pod that has rows, and remove the lock under which it was answered in full."""
    table, ledger, lock = facts.table, facts.ledger, facts.lock
    graves = {stone.pod.uid: stone.pod for stone in table.tombstones}
    names = {pod.key for pod in table.pods.values()}
    for uid in dict.fromkeys(row.key.pod_uid for row in ledger.rows_by(Decider.SCHEDULER)):
        is_there, rows = uid in table.pods, ledger.rows_of(uid)
        pod = table.pods.get(uid) or graves.get(uid)
        if pod is None or pod.static or (is_there and pod.terminal):
            continue  # the lock of a pod that has ended: see _for_lock
        if not is_there and pod.key in names:
            continue  # its successor may have taken over the lock
        last = max(rows, key=lambda row: row.answered_at)
        is_complete = {row.key.container for row in rows} >= {
            container.name
            for container in pod.asking(last.resource)
            if not is_over(container, last.epoch)
        }
        settle = Effect(
            kind=EffectKind.SETTLE_POD,
            pod_uid=uid,
            namespace=pod.namespace,
            pod=pod.name,
            due=last.answered_at if is_complete else last.answered_at + QUIET,
            phase=PHASE_SUCCESS if is_complete else "",
            groups=tuple(sorted(row.group for row in rows)),
        )
        frees = is_complete and lock is not None and any(row.lock == lock.value for row in rows)
        if frees and lock is not None and (pod.reusable_name or not is_there):
            # Another pod of this name may have taken over the lock. The patch of the pod has the
            # UID, so it fails in that case, and the lock stays.
            yield msgspec.structs.replace(settle, lock=lock.value)
        else:
            if frees and lock is not None:
                yield _release(lock, uid, last.answered_at)
            if is_there and _changes(pod, settle):
                yield settle


def _for_refused(facts: SettlementFacts) -> Iterator[Effect]:
    """Settle each pod that the agent refused as failed."""
    begun: Counter[str] = Counter()
    for pod in facts.table.pods.values():
        is_tried = pod.uid in facts.tried
        if begun[pod.namespace] >= REFUSED_AT_ONCE and not is_tried:
            continue
        is_noted = pod.annotations.get(BIND_PHASE) == PHASE_FAILED
        if pod.static or is_noted or not refusal_text(pod):
            continue
        begun[pod.namespace] += not is_tried  # a patch that fails for good hides no other pod
        where = pod.uid, pod.namespace, pod.name, facts.now
        yield Effect(EffectKind.SETTLE_POD, *where, phase=PHASE_FAILED)


def _for_lock(facts: SettlementFacts) -> tuple[Effect, ...]:
    """Remove the lock of an owner that no longer needs it: answered in full, terminal, or gone.

    The lock has no UID, its time stamp has no fixed order to the pod's, and Pods and Node have
    separate watches. So the owner is found in one of three ways:
    - A pod was answered under exactly this lock; if it is gone, a patch with its UID shows that no
      other pod has the name.
    - For another owner on this node, a patch with its UID shows that no other pod has the name.
    - If the owner is not here, or asks for no GPU of ours, the lock must have stood for UNCLAIMED.
      HAMi lets a pod take over the lock of a former pod of its name, and a pod that asks for no GPU
      may wait for another vendor's plugin.
    """
    lock = facts.lock
    if lock is None or lock.owner is None:
        return ()
    owner = facts.table.named(*lock.owner)
    rows = facts.ledger.rows_by(Decider.SCHEDULER)
    answered = next((row.key.pod_uid for row in rows if row.lock == lock.value), None)
    is_young = facts.standing < UNCLAIMED
    if owner is None and answered is not None and is_young and not facts.table.stale:
        # Its pod went while no agent ran: the patch with its UID shows whether the name is free.
        # If another pod has it, the patch fails for ever, and the lock goes by its age, as below.
        return (Effect(EffectKind.SETTLE_POD, answered, *lock.owner, facts.now, lock=lock.value),)
    if owner is None or not (owner.gpu_containers or owner.terminal):
        is_left = not facts.table.stale and not is_young
        return (_release(lock, NOBODY, facts.now),) if is_left else ()
    if not owner.terminal:
        if not _is_answered(owner, facts):
            return ()
        if any(row.lock == lock.value for row in facts.ledger.rows_of(owner.uid)):
            return (_release(lock, owner.uid, facts.now),)
    phase = PHASE_FAILED if refusal_text(owner) else ""
    where = owner.uid, owner.namespace, owner.name, facts.now
    return (Effect(EffectKind.SETTLE_POD, *where, phase=phase, lock=lock.value),)


def _release(lock: NodeLock, uid: PodUid, due: dt.datetime) -> Effect:
    return Effect(EffectKind.RELEASE_LOCK, uid, lock.namespace, lock.name, due, lock=lock.value)


def _is_answered(pod: PodView, facts: SettlementFacts) -> bool:
    """Whether no GPU container of the pod waits for an answer.

    A container that runs needs none: after a lost checkpoint the kubelet starts pods without an
    Allocate. But after a reboot the status is old, and the kubelet may be about to ask: so the lock
    must have stood for UNCLAIMED. An answer in the future is old, because the clock was set back.
    """
    rows = {row.key.container: row for row in facts.ledger.rows_of(pod.uid)}
    unanswered = [container for container in pod.gpu_containers if container.name not in rows]
    if unanswered and facts.standing < UNCLAIMED:
        return False
    for container in unanswered:
        # Ordinary init containers end before app containers.
        is_past = container.role is Role.INIT and pod.phase is Phase.RUNNING
        if not (is_past or container.running_id is not None or container.has_run):
            return False
    last = max((row.answered_at for row in rows.values()), default=None)
    return last is None or not dt.timedelta(0) <= facts.now - last < ANSWERED_GRACE


def events_of(effects: Iterable[Effect], facts: SettlementFacts) -> Iterator[NodeEvent]:
    """What people are told: why a pod was refused, and that one was given another GPU."""

    def event(pod: PodView, reason: str, text: str) -> NodeEvent:
        where = pod.namespace, pod.name, pod.uid
        return NodeEvent(reason, text, True, *where)

    pods = facts.table.pods
    for effect in effects:
        if effect.is_rationed:
            pod = pods[effect.pod_uid]
            yield event(pod, REFUSED_EVENT, refusal_text(pod))
    for row in facts.ledger.rows:
        shown = pods.get(row.pod_uid)
        if row.mismatched and row.confirmed and shown and not (shown.static or shown.terminal):
            yield event(shown, MISMATCH_EVENT, str(mismatch(row)))


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


# Performs what is owed, and retries it until it is done.
#
# - Locks come first, because the scheduler waits for them.
# - An effect on a lock or a pod is done when the API server accepted it or can never accept it. A
#   patch of a pod that is still shown is tried again later: a webhook may have refused it.
# - An Event is handed on once, and posted beside this. It may be lost.

PERIOD = 1.0
"""Seconds between two looks while the node is locked: the grace period ends without an event."""

DELAYS = (0.1, 0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
"""Seconds before each retry of an effect; the last one repeats."""

LOCK_DELAYS = (0.1, 0.5, 1.0, 2.0, 4.0)
"""The same for a lock. Until a lock is free, the scheduler places nothing on this node. It must be
free 5 s after the API server is back, jitter included."""

REJECTED_AGAIN = 300.0
"""Seconds after which a patch that can never be accepted is tried again, if its pod is shown."""

PARALLEL = 4
"""The most effects in flight. One place is reserved for locks, so that requests for pods that hang
do not delay locks."""

GRAIN = 0.001
"""Seconds; shorter waits count as 0."""

HORIZON = dt.timedelta(seconds=5)
"""No effect is due later than this. A later due time was set before the clock was set back."""

REFUSED = 220
REFUSED_REFILL = 2.0
"""Allowance for patches of refused pods without a lock: 220 at once, which is twice the pods of a
kubelet, then one every 2 s. A tenant can cause them without end, and nothing waits for them."""

OUTLIVED = 64
"""How many locks are remembered whose pod went first; as many as NodeView.former_locks has."""


class _Trouble(msgspec.Struct, eq=False):
    """The retry state of an effect that failed. `until`: loop time of the next try."""

    backoff: Backoff
    until: float = 0.0


class Settlement:
    """Derives what is owed and performs it.

    `say` takes the Events about pods. Sole writer of `outlived`: locks, each with the UID of its
    answered pod, that were still held when that pod was deleted.
    """

    def __init__(
        self,
        *,
        pods: Cell[PodTable],
        node: Cell[NodeView | None],
        ledger: Cell[Ledger],
        outlived: Cell[Mapping[str, PodUid]],
        node_api: NodeApi,
        pod_api: PodApi,
        say: Callable[[NodeEvent], None],
        clock: Clock,
        random: random.Random,
    ) -> None:
        self._pods = pods
        self._node = node
        self._ledger = ledger
        self._outlived = outlived
        self._node_api = node_api
        self._pod_api = pod_api
        self._say = say
        self._clock = clock
        self._random = random
        self._sighting: tuple[str, float] | None = None
        """A lock's text, and the loop time at which it was first seen with a current pod table."""
        self._owed: Cell[tuple[Effect, ...]] = Cell(())
        self._done: frozenset[Effect] = frozenset()
        """Effects that are done, while the views do not show it yet."""
        self._active: Cell[frozenset[Effect]] = Cell(frozenset())
        self._trouble: dict[tuple[EffectKind, PodUid, str], _Trouble] = {}
        self._failures = Cell(0)
        self._ration = Allowance(REFUSED, REFUSED_REFILL)
        self._told: set[NodeEvent] = set()
        self.results = Tally(
            "outbox_effects_total",
            "Effects that followed an answer, by kind and result.",
            ("kind", "result"),
        )

    async def run(self) -> NoReturn:
        """Perform every effect when it is due."""
        news = News(self._owed, self._active)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            while True:
                # Locks first; what failed behind what was not tried yet.
                for effect in sorted(
                    self._open(),
                    key=lambda each: (not each.frees_lock, each.identity in self._trouble),
                ):
                    most = PARALLEL if effect.frees_lock else PARALLEL - 1
                    is_free = effect.place not in {each.place for each in self._active.value}
                    if len(self._active.value) < most and is_free and self._left(effect) <= GRAIN:
                        if effect.is_rationed:
                            self._ration.spend(asyncio.get_running_loop().time())
                        self._active.set(self._active.value | {effect})
                        group.create_task(self._perform(effect))
                waits = [left for each in self._open() if (left := self._left(each)) > GRAIN]
                await news.wait(min(waits, default=None))

    async def _follow(self) -> NoReturn:
        """Derive effects after each change of pods, Node or ledger; each second while locked.

        Also after each failure: see REFUSED_AT_ONCE.
        """
        news = News(self._pods, self._node, self._ledger, self._failures)
        while True:
            lock = held_lock(self._node.value)
            self._derive(lock)
            await news.wait(PERIOD if lock is not None else None)

    def _derive(self, lock: NodeLock | None) -> None:
        table, elapsed = self._pods.value, asyncio.get_running_loop().time()
        # The time of a lock restarts after a gap in the pod watch: an owner that was bound in the
        # gap is not in the table at once.
        if lock is None or table.stale or not table.synced:
            self._sighting = None
        elif self._sighting is None or self._sighting[0] != lock.value:
            self._sighting = lock.value, elapsed
        stood = elapsed - self._sighting[1] if self._sighting else 0.0
        tried = (*self._trouble, *(each.identity for each in self._done))
        facts = SettlementFacts(
            table,
            self._ledger.value,
            lock,
            self._clock.now(),
            dt.timedelta(seconds=stood),
            frozenset(uid for kind, uid, *_ in tried if kind is EffectKind.SETTLE_POD),
        )
        before = {each.identity: each for each in self._owed.value}
        found: list[Effect] = []
        for effect in owed(facts):
            old = before.get(effect.identity)
            # What was owed already keeps its due time.
            is_same = old is not None and msgspec.structs.replace(effect, due=old.due) == old
            found.append(old if old is not None and is_same else effect)
            if old is None and not effect.groups:  # an answer has its own line in the log
                log.info(
                    "settlement.owed", kind=effect.kind.value, ns=effect.namespace, pod=effect.pod
                )
        for event in events_of(found, facts):
            if event not in self._told:
                self._told.add(event)
                self._say(event)
        self._told = {event for event in self._told if event.pod_uid in table.pods}
        current = frozenset(found)
        # A pod is settled once for each answer: who writes its annotations again is not fought.
        self._done = frozenset(
            each
            for each in self._done
            if each in current or (each.groups and each.pod_uid in table.pods)
        )
        known = {each.identity for each in found}
        self._trouble = {name: one for name, one in self._trouble.items() if name in known}
        self._owed.set(tuple(found))

    def _open(self) -> list[Effect]:
        """What is owed, not done and not in flight."""
        taken = self._done | self._active.value
        return [effect for effect in self._owed.value if effect not in taken]

    def _left(self, effect: Effect) -> float:
        """Seconds until the effect may be performed."""
        trouble = self._trouble.get(effect.identity)
        elapsed = asyncio.get_running_loop().time()
        pause = trouble.until - elapsed if trouble else 0.0
        if effect.is_rationed:
            pause = max(pause, self._ration.wait(elapsed))
        wait = effect.due - self._clock.now()
        return max(pause, wait.total_seconds() if wait <= HORIZON else 0.0)

    async def _perform(self, effect: Effect) -> None:
        """Perform the effect, or drop it if it can never succeed. After a failure, try again."""
        try:
            result = await self._done_with(effect)
        except ApiError as error:
            trouble = self._trouble_of(effect)
            delay = max(trouble.backoff.next(), error.retry_after or 0.0)
            trouble.until = asyncio.get_running_loop().time() + delay
            self.results.add(effect.kind.value, "failed")
            log.warning(
                "settlement.put_off",
                kind=effect.kind.value,
                pod=effect.pod,
                again_in=delay,
                err=str(error),
            )
        else:
            self.results.add(effect.kind.value, result)
            is_patch = effect.kind is EffectKind.SETTLE_POD
            if result == "dropped" and is_patch and effect.pod_uid in self._pods.value.pods:
                # The view is late, or a webhook refuses what is right: that may pass, and until it
                # does, no pod behind this one has to wait.
                self._trouble_of(effect).until = asyncio.get_running_loop().time() + REJECTED_AGAIN
                return
            self._done |= {effect}
            if is_patch:
                # The same patch without the lock: the watch of the Node may be the quicker one.
                self._done |= {msgspec.structs.replace(effect, lock="")}
            self._trouble.pop(effect.identity, None)
        finally:
            self._active.set(self._active.value - {effect})

    def _trouble_of(self, effect: Effect) -> _Trouble:
        self._failures.set(self._failures.value + 1)
        backoff = Backoff(LOCK_DELAYS if effect.frees_lock else DELAYS, 0.2, self._random)
        return self._trouble.setdefault(effect.identity, _Trouble(backoff))

    async def _done_with(self, effect: Effect) -> str:
        """The result for the metric. Raises ApiError: try again."""
        try:
            if effect.kind is EffectKind.SETTLE_POD:
                return await self._settle(effect)
            if effect.pod_uid == NOBODY:
                await self._require_unclaimed(effect)
            return await self._release(effect)
        except ApiNotFound:
            return "dropped"  # the pod or the Node is gone
        except ApiInvalid as error:
            log.info("settlement.invalid", kind=effect.kind.value, pod=effect.pod, err=str(error))
            # The pod of that name has another UID, or something refuses the patch.
            return "dropped"
        except (ApiConflict, ApiForbidden):
            # The pod is gone? A 403 also comes for a pod on another node, a 409 also from a
            # concurrent write. So the pod table decides.
            table = self._pods.value
            is_gone = table.synced and effect.pod_uid not in table.pods
            if effect.kind is EffectKind.SETTLE_POD and is_gone:
                return "dropped"
            raise

    async def _settle(self, effect: Effect) -> str:
        """Patch the pod once (remove the consumed groups, set the phase), then release its lock.

        If the effect has a lock, the pod is patched even if nothing changes. The patch proves that
        the name still belongs to its UID or to no pod, so that the lock is not another pod's.
        """
        pod = self._pods.value.pods.get(effect.pod_uid)
        is_ended = pod is None or (pod.terminal and effect.phase == PHASE_SUCCESS)
        changes = {} if pod is None or is_ended else _changes(pod, effect)
        if not effect.lock and (is_ended or not changes):
            return "dropped" if is_ended else "unchanged"
        was_here = True
        try:
            await self._pod_api.annotate_pod(effect.namespace, effect.pod, effect.pod_uid, changes)
        except ApiNotFound:
            if not effect.lock:
                raise
            was_here = False
        if not effect.lock:
            return "done"
        result = await self._release(effect)
        if was_here and result == "done":
            # Was the pod deleted since the patch? Then the next pod of that name may have taken the
            # lock meanwhile. One that was deleted before the patch does not matter: a tenant can
            # replace an answered pod at any time.
            try:
                now = await self._get(effect)
            except ApiError as error:
                log.warning(
                    "lock.owner_unknown", ns=effect.namespace, pod=effect.pod, err=str(error)
                )
            else:
                if now is None or now.uid != effect.pod_uid:
                    noted = {**self._outlived.value, effect.lock: effect.pod_uid}
                    self._outlived.set(dict(list(noted.items())[-OUTLIVED:]))
        return result

    async def _require_unclaimed(self, effect: Effect) -> None:
        """Raise ApiError if the owner of a lock that seemed to be nobody's is here after all."""
        shown = self._pods.value.named(effect.namespace, effect.pod)
        owner = shown or await self._get(effect)
        # A shown pod that asks for no GPU of ours is why the lock goes: see _for_lock.
        if owner is not None and not owner.terminal and (owner.gpu_containers or not shown):
            raise ApiError(f"pod {effect.namespace}/{effect.pod} is on this node by now")

    async def _get(self, effect: Effect) -> PodView | None:
        """The pod of that name as it is now. Raises ApiError."""
        try:
            return await self._pod_api.get_pod(effect.namespace, effect.pod)
        except ApiForbidden:
            return None  # a node's identity may not read a pod that is gone or not bound to it yet

    async def _release(self, effect: Effect) -> str:
        """Remove the lock if it still has this text. Returns the result for the metric."""
        try:
            await self._node_api.release_lock(MUTEX_LOCK, effect.lock)
        except ApiInvalid:
            return "not-ours"  # it is gone, or has another text
        log.info("lock.released", ns=effect.namespace, pod=effect.pod)
        return "done"
