"""Hami mode: decides what a container gets by the annotation that HAMi's scheduler wrote."""

import asyncio
import contextlib
import datetime as dt
from collections.abc import Callable
from itertools import chain
from typing import NoReturn

import msgspec
import structlog

from agent.core.allocation.answered import answered
from agent.core.allocation.evidence import Grant, KubeletStart
from agent.core.allocation.preference import nearest, steer
from agent.core.allocation.settings import MatchSettings
from agent.core.allocation.steps import DISK_BUDGET, VAIN, VAIN_REFILL, AllocateStep
from agent.core.containers.container_edits import check_library
from agent.core.containers.edits import EditSettings, HookFacts
from agent.core.errors import AgentError, Refusal, RefusalReason, StateError
from agent.core.inventory.slices import SliceId
from agent.core.ports import HookDirs
from agent.core.state.holdings import KubeletEpoch
from agent.core.state.ledger import Ledger
from agent.kit.backoff import Allowance
from agent.kit.cell import Cell
from agent.kit.running_time import Budget
from agent.kit.turns import Turn, Turns
from agent.services.allocation.calls import AllocateCall, AllocateCalls
from agent.services.allocation.inquiry import Inquiry
from agent.services.allocation.rows import Rows
from agent.services.allocation.views import AllocationPeers, AllocationViews, Underway
from agent.services.allocation.waits import Waits

log = structlog.get_logger(__name__)

PROMPT = dt.timedelta(seconds=0.5)
"""A list that the kubelet begins to take this soon after its socket appeared comes before its first
admission, 0.9 to 1.0 s after the socket."""

LOOK_DEADLINE = 0.4
"""Seconds for a look at the cgroups that must be over by then."""

PREFER_BUDGET = 0.2
"""Seconds for GetPreferredAllocation. The kubelet calls it just before Allocate."""


class AllocationSettings(msgspec.Struct, frozen=True):
    """How pods are matched and how answers are made."""

    match: Cell[MatchSettings]
    edits: Cell[EditSettings]


class SchedulerShares:
    """A ShareSource: the pod's annotation says what each container gets.

    Only the number of the kubelet's ids counts. The ids themselves may differ after a restart,
    which is never a reason to refuse.
    """

    def __init__(
        self,
        views: AllocationViews,
        peers: AllocationPeers,
        hooks: HookDirs,
        settings: AllocationSettings,
    ) -> None:
        self._views = views
        self._peers = peers
        self._hooks = hooks
        self._settings = settings
        self._vain = Allowance(VAIN, VAIN_REFILL)
        self._start = KubeletStart()
        self._started: tuple[KubeletEpoch | None, str] = None, ""
        """The kubelet instance of `_start`, and the resource that it began to take."""
        self._rows = Rows(
            inventory=views.inventory,
            edits=settings.edits,
            hooks=hooks,
            epoch=self._epoch,
            clock=peers.clock,
        )
        self.adopt = self._rows.adopted
        self.calls = AllocateCalls(Turns(peers.epoch), peers.lag)

    async def run(self) -> NoReturn:
        """See each kubelet begin to take the lists, for ever, and which pods have no cgroup then.

        From then on it asks for the containers of each pod that it admits; before, if it has lost
        its checkpoint, it does not know the resource, and starts them without asking. A new kubelet
        starts no container before its first admission.
        """
        async for streams in self._peers.streams.follow():
            epoch, now = self._peers.epoch(), self._peers.clock.now()
            kubelet = epoch, self._settings.match.value.resource
            if streams == 0 or epoch is None or kubelet == self._started:
                continue
            is_prompt = dt.timedelta(0) <= now - epoch.since < PROMPT
            self._start = KubeletStart() if is_prompt else KubeletStart(asks_since=now)
            self._started = kubelet
            if is_prompt:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_DEADLINE):
                        self._start = KubeletStart(begun=await self._peers.containers.begun())
        raise AssertionError("the list streams are never closed")

    async def decide(
        self, ids: tuple[SliceId, ...], call: AllocateCall
    ) -> Callable[[Ledger], Ledger]:
        """Set the row of the call. One write stores the row and its effects. Raises Refusal."""
        grant, facts = await self._granted(len(ids), call)
        call.is_replay = call.turn.yields = grant.replay is not None
        call.oversold = grant.oversold
        offered = self.calls.take_offer(grant.key)
        call.row = row = self._rows.granted(grant, ids, facts, offered=offered)
        if call.is_replay:
            return lambda ledger: ledger.put(row)
        check_library(facts, grant.candidate.container)
        return lambda ledger: answered(ledger, grant.candidate.pod, row)

    def refused(self, refusal: Refusal, call: AllocateCall) -> None:
        """Exclude a pod that is refused at its admission: the kubelet does not ask for it again."""
        row, pods, epoch = call.row, self._views.pods.value, self._epoch()
        if row is None or call.is_replay or refusal.gate is RefusalReason.OVERLAP:
            return
        if row.epoch != epoch:  # a new kubelet asks again
            return
        pod = pods.pods.get(row.key.pod_uid)
        if pod is None or not pod.has_run:
            self.calls.use_up(row.key.pod_uid, pods, epoch)

    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """`size` of the available ids: on the annotated GPUs if possible, else on near ones."""
        turn = self.calls.turns.begin()
        grant = await self._preferred(size, turn)
        held = frozenset(chain.from_iterable(self._underway().ledger.held_ids().values()))
        chosen = None
        if grant is not None:
            wanted = tuple(share.uuid for share in grant.shares)
            chosen = steer(available, must_include, wanted, held)
            self.calls.take_offer(grant.key)
            if chosen is not None:
                self.calls.offer(grant.key)
        if chosen is None:
            gpus = {shared.uuid: shared.gpu for shared in self._views.inventory.value.gpus}
            chosen = nearest(available, must_include, size, gpus, held)
        turn.ids = frozenset(chosen)
        return chosen

    async def _granted(self, count: int, call: AllocateCall) -> tuple[Grant, HookFacts]:
        """Which container the call is for, what it gets, and what it mounts. Raises Refusal."""
        inquiry, epoch = self._inquiry(call), self._epoch()
        try:
            async with call.disk.within():
                with self.calls.waits.waiting("hook-path"):
                    facts = await self._hooks.facts()
            call.step = AllocateStep.MATCH
            grant = await inquiry.grant(count, self._underway)
        except (Refusal, StateError, TimeoutError, asyncio.CancelledError):
            refused = inquiry.in_vain(count, self._underway())
            if refused is not None and epoch == self._epoch():  # else a new kubelet asks again
                self.calls.use_up(refused, self._views.pods.value, epoch)
            raise
        if grant is None:  # pragma: no cover -- a patient inquiry decides or raises
            raise Refusal(RefusalReason.OUT_OF_TIME, "The agent could not decide; report this.")
        return grant, facts

    async def _preferred(self, size: int, turn: Turn) -> Grant | None:
        """What the container that is being admitted would get; None: not known.

        The Allocate that follows is for the same container: of no pod that is not known now.
        """
        inquiry = self._inquiry(None)
        try:
            async with asyncio.timeout(PREFER_BUDGET):
                turn.all_there = await inquiry.names(self._underway())
                return await inquiry.grant(size, self._underway)
        except (AgentError, TimeoutError) as error:
            log.debug("prefer.unsteered", reason=str(error) or "out of time")
            return None
        finally:
            turn.absent, turn.present = inquiry.told(known=False), inquiry.told(known=True)

    def _inquiry(self, call: AllocateCall | None) -> Inquiry:
        """The inquiry of an Allocate; None: of a preference."""
        match, epoch = self._settings.match.value, self._epoch()
        unseen = KubeletStart(asks_since=epoch.since)  # such as one whose socket was only touched
        return Inquiry(
            self._views,
            self._peers,
            match,
            patient=call is not None,
            vain=self._vain,
            waits=self.calls.waits if call else Waits(),
            disk=call.disk if call else Budget(self.calls.lag, DISK_BUDGET),
            start=self._start if self._started == (epoch, match.resource) else unseen,
            turn=call.turn if call else None,
        )

    def _underway(self) -> Underway:
        ledger = self.calls.on_their_way(self._views.ledger.value)
        return Underway(ledger, self.calls.claimed(self._epoch()), self.calls.spent)

    def _epoch(self) -> KubeletEpoch:
        return self._peers.epoch() or KubeletEpoch()
