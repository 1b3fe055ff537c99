"""The outbox: effects that follow an answer, retried until done, also after a crash.

Locks first, for the scheduler waits for them. An effect leaves the ledger only when the API server
accepted it or can never accept it.
"""

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable
from typing import NoReturn

import structlog

from agent.codec.pod import consume
from agent.core.annotations import BIND_PHASE, MUTEX_LOCK, PHASE_FAILED, TO_ALLOCATE
from agent.core.changes import NodeEvent
from agent.core.errors import (
    ApiConflict,
    ApiError,
    ApiInvalid,
    ApiNotFound,
    ApiThrottled,
    StateError,
)
from agent.core.ledger import Effect, EffectKind, Ledger
from agent.core.pods import PodTable
from agent.core.ports import Clock, NodeApi, PodApi
from agent.kit.backoff import Backoff
from agent.kit.cell import Cell
from agent.kit.tally import Tally

log = structlog.get_logger(__name__)

DELAYS = (0.1, 0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
"""Seconds before an effect is tried again; the last one repeats."""

PARALLEL = 4
"""Effects under way at once: an API server that hangs must not hold up the locks behind it."""

_URGENCY = {EffectKind.RELEASE_LOCK: 0, EffectKind.SETTLE_POD: 1, EffectKind.POST_EVENT: 2}


@dataclasses.dataclass(frozen=True, slots=True)
class OutboxViews:
    """What the outbox follows."""

    ledger: Cell[Ledger]
    pods: Cell[PodTable]


@dataclasses.dataclass(eq=False, slots=True)
class _Trouble:
    """An effect that failed: when to try again."""

    backoff: Backoff
    until: float = 0.0


class Outbox:
    """Performs what the ledger owes. `commit` is the ledger's."""

    def __init__(
        self,
        *,
        views: OutboxViews,
        api: tuple[NodeApi, PodApi],
        commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]],
        clock: Clock,
        random: random.Random,
    ) -> None:
        self._views = views
        self._nodes, self._pods = api
        self._commit = commit
        self._clock = clock
        self._random = random
        self._trouble: dict[tuple[object, ...], _Trouble] = {}
        self.results = Tally("outbox_effects", "Effects by kind and result.", ("kind", "result"))

    async def run(self) -> NoReturn:
        """Perform every effect when it is due."""
        while True:
            due = self._due()
            if due:
                await self._perform_all(due)
            else:
                await self._news()

    def _due(self) -> list[Effect]:
        """The effects to try now, locks first."""
        now, elapsed = self._clock.now(), asyncio.get_running_loop().time()
        found = [
            effect
            for effect in self._views.ledger.value.outbox
            if effect.due <= now and self._until(effect) <= elapsed
        ]
        return sorted(found, key=lambda effect: _URGENCY[effect.kind])

    def _until(self, effect: Effect) -> float:
        trouble = self._trouble.get(effect.identity)
        return trouble.until if trouble else 0.0

    async def _news(self) -> None:
        """Wait for a change of the ledger or the moment that the next effect is due."""
        ledger = self._views.ledger.value
        now, elapsed = self._clock.now(), asyncio.get_running_loop().time()
        waits = [
            max((effect.due - now).total_seconds(), self._until(effect) - elapsed, 0.0)
            for effect in ledger.outbox
        ]
        try:
            async with asyncio.timeout(min(waits) if waits else None):
                await self._views.ledger.until(lambda value: value.outbox != ledger.outbox)
        except TimeoutError:
            return

    async def _perform_all(self, effects: list[Effect]) -> None:
        places = asyncio.Semaphore(PARALLEL)

        async def one(effect: Effect) -> None:
            async with places:
                await self._perform(effect)

        async with asyncio.TaskGroup() as group:
            for effect in effects:
                group.create_task(one(effect))

    async def _perform(self, effect: Effect) -> None:
        try:
            result = await self._act(effect)
        except (ApiConflict, ApiNotFound):
            result = "dropped"  # the pod is another one now, or gone
        except ApiInvalid:
            result = "not-ours"  # the lock is absent or another's: it was released
        except ApiError as error:
            self._put_off(effect, error)
            return
        self._trouble.pop(effect.identity, None)
        self.results.add(effect.kind.value, result)
        try:
            await self._commit(lambda ledger: ledger.done(effect))
        except StateError as error:
            # The effect is idempotent: it is performed again once the disk takes writes.
            self._put_off(effect, error)

    def _put_off(self, effect: Effect, error: ApiError | StateError) -> None:
        trouble = self._trouble.setdefault(
            effect.identity, _Trouble(Backoff(DELAYS, 0.2, self._random))
        )
        delay = trouble.backoff.next()
        if isinstance(error, ApiThrottled) and error.retry_after is not None:
            delay = max(delay, error.retry_after)
        trouble.until = asyncio.get_running_loop().time() + delay
        self.results.add(effect.kind.value, "failed")
        log.warning(
            "outbox.put_off", kind=effect.kind.value, pod=effect.pod, again_in=delay, err=str(error)
        )

    async def _act(self, effect: Effect) -> str:
        match effect.kind:
            case EffectKind.RELEASE_LOCK:
                await self._nodes.release_lock(MUTEX_LOCK, effect.value)
                log.info("lock.released", ns=effect.namespace, pod=effect.pod)
            case EffectKind.SETTLE_POD:
                return await self._settle(effect)
            case EffectKind.POST_EVENT:
                await self._pods.post_event(_event(effect))
        return "done"

    async def _settle(self, effect: Effect) -> str:
        """One patch of the pod: the consumed groups go, the phase is set."""
        pod = self._views.pods.value.pods.get(effect.pod_uid)
        if pod is None or (pod.terminal and effect.phase != PHASE_FAILED):
            return "dropped"
        changes: dict[str, str | None] = {}
        text = pod.annotations.get(TO_ALLOCATE)
        if effect.groups and text is not None:
            consumed = consume(text, effect.groups)
            if consumed != text:
                changes[TO_ALLOCATE] = consumed
        if effect.phase and pod.annotations.get(BIND_PHASE) != effect.phase:
            changes[BIND_PHASE] = effect.phase
        if not changes:
            return "unchanged"
        await self._pods.annotate_pod(effect.namespace, effect.pod, effect.pod_uid, changes)
        return "done"


def _event(effect: Effect) -> NodeEvent:
    return NodeEvent(
        reason=effect.reason,
        text=effect.value,
        warning=True,
        namespace=effect.namespace,
        pod=effect.pod,
        pod_uid=effect.pod_uid,
    )
