"""GetPreferredAllocation: the ids of the GPUs that the scheduler chose, or near ones."""

import asyncio
from collections.abc import Callable

import structlog

from agent.core.allocation.evidence import Grant
from agent.core.allocation.preference import nearest, steer
from agent.core.allocation.settings import MatchSettings
from agent.core.errors import AgentError
from agent.core.inventory.slices import SliceId
from agent.kit.allowance import Allowance
from agent.services.allocation.calls import AllocateCalls
from agent.services.allocation.inquiry import Inquiry
from agent.services.allocation.views import AllocationPeers, AllocationViews, Underway

log = structlog.get_logger(__name__)

PREFER_BUDGET = 0.2
"""Seconds for GetPreferredAllocation, which the kubelet asks just before: 1 s for both."""


class Preferring:
    """Answers what is preferred.

    `underway` is what this process has under way, `vain` as in Inquiry.
    """

    def __init__(
        self,
        views: AllocationViews,
        peers: AllocationPeers,
        calls: AllocateCalls,
        underway: Callable[[], Underway],
        vain: Allowance,
    ) -> None:
        self._views = views
        self._peers = peers
        self._calls = calls
        self._underway = underway
        self._vain = vain

    async def prefer(
        self,
        available: tuple[SliceId, ...],
        must_include: tuple[SliceId, ...],
        size: int,
        match: MatchSettings,
    ) -> tuple[SliceId, ...]:
        """`size` of the offered ids: of the annotated GPUs if they can be had, else near ones."""
        turn = self._calls.turns.begin()
        grant = await self._grant(size, match)
        ledger = self._underway().ledger
        held = frozenset(text for ids in ledger.held_ids().values() for text in ids)
        chosen = None
        if grant is not None:
            wanted = tuple(share.uuid for share in grant.shares)
            chosen = steer(available, must_include, wanted, held)
            self._calls.take_offer(grant.key)
            if chosen is not None:
                self._calls.offer(grant.key)
        if chosen is None:
            gpus = {one.uuid: one.gpu for one in self._views.inventory.value.gpus}
            chosen = nearest(available, must_include, size, gpus, held)
        turn.ids = frozenset(chosen)
        return chosen

    async def _grant(self, size: int, match: MatchSettings) -> Grant | None:
        """What the container that is being admitted would get, or None: that is not known."""
        try:
            async with asyncio.timeout(PREFER_BUDGET):
                inquiry = Inquiry(self._views, self._peers, match, patient=False, vain=self._vain)
                return await inquiry.grant(size, self._underway)
        except (AgentError, TimeoutError) as error:
            log.debug("prefer.unsteered", reason=str(error) or "out of time")
            return None
