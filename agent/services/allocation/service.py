"""One Allocate: which pod, which shares, on disk, and only then the answer.

Prepare, commit, answer: the host directory is made and the row is durable before the kubelet hears
anything. What may follow (the pod's annotations, the lock) is owed in the same row of disk.
"""

import asyncio
import dataclasses
from collections.abc import Callable

from agent.core.allocation.answered import answered
from agent.core.allocation.at_admission import is_taking_up
from agent.core.allocation.evidence import Grant
from agent.core.allocation.settings import MatchSettings
from agent.core.allocation.steps import ALLOCATE_BUDGET, TAKING_UP_BUDGET, AllocateStep
from agent.core.cluster.changes import NodeEvent
from agent.core.containers.container_edits import check_library, container_directory
from agent.core.containers.edits import ContainerEdits, EditSettings, HookFacts
from agent.core.errors import Refusal, RefusalReason, StateError
from agent.core.inventory.slices import SliceId
from agent.core.reconcile.settlement import REFUSED_EVENT
from agent.core.state.holdings import KubeletEpoch
from agent.core.state.ledger import Ledger, Row
from agent.kit.allowance import Allowance
from agent.kit.cell import Cell
from agent.kit.turns import Turns
from agent.services.allocation.calls import AllocateCall, AllocateCalls, overlap, refusal_of
from agent.services.allocation.inquiry import VAIN, VAIN_REFILL, Inquiry
from agent.services.allocation.outcomes import Outcomes, oversold, whose
from agent.services.allocation.preferring import Preferring
from agent.services.allocation.rows import Rows
from agent.services.allocation.storage import Storage
from agent.services.allocation.views import AllocationPeers, AllocationViews, Underway

_OF_NO_POD = frozenset({RefusalReason.NO_POD_ADMITTED, RefusalReason.STATIC_POD})
"""Refusals of pods that the API server does not know, or not yet: their Event is the Node's."""


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationSettings:
    """How pods are matched and how answers are made. `edits` has our resource's present name."""

    match: MatchSettings
    edits: Cell[EditSettings]


class Allocation:
    """Answers the kubelet. Calls may overlap; each claims its pod before it waits for the disk.

    `say` posts an Event about the Node.
    """

    def __init__(
        self,
        *,
        views: AllocationViews,
        peers: AllocationPeers,
        storage: Storage,
        settings: AllocationSettings,
        say: Callable[[NodeEvent], None],
    ) -> None:
        self._views = views
        self._peers = peers
        self._storage = storage
        self._settings = settings
        self._calls = AllocateCalls(Turns(peers.epoch))
        self._rows = Rows(
            inventory=views.inventory,
            edits=settings.edits,
            hooks=storage.hooks,
            epoch=self._epoch,
            clock=peers.clock,
        )
        self.adopt = self._rows.adopted
        self.taken = self._calls.taken
        self._vain = Allowance(VAIN, VAIN_REFILL)
        self._preferring = Preferring(views, peers, self._calls, self._underway, self._vain)
        self._outcomes = Outcomes()
        self._say = say
        self.results = self._outcomes.results

    async def allocate(
        self, ids: tuple[SliceId, ...], resource: str | None = None
    ) -> ContainerEdits:
        """What the container that the kubelet is admitting receives. Raises Refusal.

        `resource` is the name that is asked by, None: the present one. In hami mode only the number
        of `ids` counts: which ids the kubelet names is normal to differ after restarts and never a
        reason to refuse.
        """
        if not ids:
            raise Refusal(RefusalReason.EMPTY_REQUEST, "The kubelet asked for no slice at all.")
        with self._calls.entered(ids) as call:
            try:
                async with asyncio.timeout(self._budget()):
                    row = await self._serve(ids, self._match(resource), call)
            except Refusal as refusal:
                self._refused(refusal, call, len(ids))
                raise
            except (TimeoutError, StateError) as error:
                translated = refusal_of(error, call)
                self._refused(translated, call, len(ids))
                raise translated from error
        if call.oversold is not None:
            self._say(oversold(call.oversold))
        gpus = [share.uuid for share in row.shares]
        self._outcomes.answered(is_replay=call.is_replay, **whose(row), gpus=gpus)
        return row.edits

    async def prefer(
        self,
        available: tuple[SliceId, ...],
        must_include: tuple[SliceId, ...],
        size: int,
        resource: str | None = None,
    ) -> tuple[SliceId, ...]:
        """`size` of the offered ids: of the annotated GPUs if they can be had, else near ones.

        Never refuses: an error here would fail the pod's admission and leak ids in the kubelet.
        """
        return await self._preferring.prefer(available, must_include, size, self._match(resource))

    def _budget(self) -> float:
        """Seconds for one Allocate."""
        is_young = is_taking_up(self._epoch(), self._peers.clock.now())
        return TAKING_UP_BUDGET if is_young else ALLOCATE_BUDGET

    def _match(self, resource: str | None) -> MatchSettings:
        """How a request by that name is matched."""
        present = self._settings.edits.value.resource
        renamed = "" if resource in {None, present} else present
        return dataclasses.replace(
            self._settings.match, resource=resource or present, renamed=renamed
        )

    async def _serve(
        self, ids: tuple[SliceId, ...], match: MatchSettings, call: AllocateCall
    ) -> Row:
        """Decide, write, answer. What may follow the answer is owed by the same write."""
        grant, facts = await self._decided(len(ids), match, call)
        # Nothing is waited for from here until the pod is claimed: a call beside this one decides.
        call.is_replay = call.turn.yields = grant.replay is not None
        call.oversold = grant.oversold
        offered = self._calls.take_offer(grant.key)
        call.row = row = self._rows.granted(grant, ids, facts, offered=offered)
        if not call.is_replay:
            check_library(facts, grant.candidate.container)
        with self._calls.claiming(row):
            if call.turn.overtaken and not call.is_replay:
                raise overlap(row, is_replay=False)
            if not (call.is_replay and call.overlapped):
                await self._write(grant, row, call)
            await self._until_it_may_be_answered(row, call)
        return row

    async def _decided(
        self, count: int, match: MatchSettings, call: AllocateCall
    ) -> tuple[Grant, HookFacts]:
        """Which container it is for, and what it gets and mounts.

        A pod that is refused at its admission does not ask again.
        """
        inquiry = Inquiry(self._views, self._peers, match, patient=True, vain=self._vain)
        try:
            call.step = AllocateStep.HOOK
            facts = await self._storage.hooks.facts()
            call.step = AllocateStep.MATCH
            grant = await inquiry.grant(count, self._underway)
        except (Refusal, StateError, asyncio.CancelledError):
            refused = inquiry.in_vain(count, self._underway())
            if refused is not None:
                self._calls.use_up(refused, self._views.pods.value, self._epoch())
            raise
        if grant is None:  # pragma: no cover -- a patient inquiry decides or raises
            raise Refusal(RefusalReason.OUT_OF_TIME, "The agent could not decide; report this.")
        return grant, facts

    async def _write(self, grant: Grant, row: Row, call: AllocateCall) -> None:
        """The container's directory, and the row on disk."""
        call.step = AllocateStep.DIRECTORY
        name = container_directory(row.key.pod_uid, row.key.container)
        await self._storage.hooks.prepare(name, wipe=not call.is_replay)
        call.step = AllocateStep.WRITE
        pod, is_replay = grant.candidate.pod, call.is_replay
        await self._storage.commit(
            lambda ledger: ledger.put(row) if is_replay else answered(ledger, pod, row)
        )
        if row.lock:
            self._calls.spend(row)

    async def _until_it_may_be_answered(self, row: Row, call: AllocateCall) -> None:
        """Looked at last: a kubelet whose earlier of two calls is granted dies of it."""
        if call.is_replay and (call.overlapped or call.turn.overtaken):
            call.step = AllocateStep.ALONE
            await self._calls.turns.until_alone(call.turn)
        if call.turn.overtaken or (call.is_replay and call.overlapped):
            raise overlap(row, is_replay=call.is_replay)

    def _underway(self) -> Underway:
        claimed = self._calls.claimed(self._epoch())
        return Underway(self._ledger(), claimed, self._calls.spent)

    def _epoch(self) -> KubeletEpoch:
        return self._peers.epoch() or KubeletEpoch()

    def _ledger(self) -> Ledger:
        """The ledger with the rows that are being written."""
        ledger = self._views.ledger.value
        for row in self._calls.pending.values():
            ledger = ledger.put(row)
        return ledger

    def _refused(self, refusal: Refusal, call: AllocateCall, count: int) -> None:
        epoch, pods = self._epoch(), self._views.pods.value
        is_first = call.row is not None and not call.is_replay
        if call.row is not None and is_first and refusal.gate is not RefusalReason.OVERLAP:
            pod = pods.pods.get(call.row.key.pod_uid)
            if pod is None or not pod.has_run:
                self._calls.use_up(call.row.key.pod_uid, pods, epoch)
        self._outcomes.refused(refusal, call.step, count, call.row)
        if refusal.gate in _OF_NO_POD:
            self._say(NodeEvent(REFUSED_EVENT, str(refusal), warning=True))
