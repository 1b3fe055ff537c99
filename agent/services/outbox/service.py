"""The outbox: performs effects that follow an answer, and retries them until done, across restarts.

- It performs the effects in the ledger, and those that settlement derives from the views, which are
  not on disk.
- Locks come first, because the scheduler waits for them.
- An effect on a lock or a pod is done when the API server accepted it or can never accept it.
- Events may be lost. They are dropped when they are refused, older than 1 h, or more than 64.
"""

import asyncio
import datetime as dt
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn

import msgspec
import structlog

from agent.core.cluster.annotations import PHASE_FAILED
from agent.core.cluster.pods import PodTable, PodUid
from agent.core.errors import (
    ApiConflict,
    ApiError,
    ApiForbidden,
    ApiInvalid,
    ApiNotFound,
    ApiThrottled,
    StateError,
)
from agent.core.ports import Clock, NodeApi, PodApi
from agent.core.state.ledger import Effect, EffectKind, Ledger
from agent.kit.backoff import Allowance, Backoff
from agent.kit.cell import Cell, News
from agent.kit.tally import Tally
from agent.services.outbox.acts import Acts

log = structlog.get_logger(__name__)

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
