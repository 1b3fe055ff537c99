"""Performs single effects at the API server."""

from collections.abc import Mapping

import structlog

from agent.codec.pod import consume
from agent.core.cluster.annotations import (
    BIND_PHASE,
    MUTEX_LOCK,
    PHASE_SUCCESS,
    TO_ALLOCATE,
)
from agent.core.cluster.pods import PodTable, PodUid, PodView
from agent.core.errors import ApiError, ApiForbidden, ApiNotFound
from agent.core.ports import NodeApi, PodApi
from agent.core.reconcile.settlement import event_of
from agent.core.state.ledger import Effect, EffectKind
from agent.kit.cell import Cell

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
