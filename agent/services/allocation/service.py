"""One Allocate: which pod, which shares, on disk, and only then the answer.

Prepare, commit, answer: the host directory is made and the row is durable before the kubelet hears
anything. What may follow (the pod's annotations, the lock) is owed in the same row of disk.
"""

import asyncio
import dataclasses
import datetime as dt
from collections.abc import Callable

import structlog

from agent.core.admission import has_run, is_taking_up
from agent.core.annotations import PHASE_SUCCESS
from agent.core.candidates import is_over
from agent.core.changes import NodeEvent
from agent.core.container_edits import (
    EditRequest,
    check_library,
    container_directory,
    container_edits,
    cuda_order,
)
from agent.core.container_order import pair_groups
from agent.core.edits import ContainerEdits, EditSettings, GrantedShare, HookFacts
from agent.core.errors import AgentError, Gate, Refusal, StateError
from agent.core.evidence import Grant
from agent.core.holdings import KubeletEpoch
from agent.core.ledger import ContainerKey, Effect, EffectKind, Ledger, Row
from agent.core.match_settings import MatchSettings
from agent.core.reconcile import Adoption
from agent.core.settlement import REFUSED_EVENT
from agent.core.share import Share
from agent.core.slices import SliceId
from agent.core.steps import ALLOCATE_BUDGET, TAKING_UP_BUDGET, Step
from agent.kit.allowance import Allowance
from agent.kit.cell import Cell
from agent.kit.turns import Turns
from agent.services.allocation.calls import Call, Calls, overlap, refusal_of
from agent.services.allocation.inquiry import VAIN, VAIN_REFILL, Inquiry
from agent.services.allocation.outcomes import Outcomes, oversold, whose
from agent.services.allocation.preferring import Preferring
from agent.services.allocation.rounds import Rounds
from agent.services.allocation.storage import Storage
from agent.services.allocation.views import Peers, Underway, Views

log = structlog.get_logger(__name__)

QUIET = dt.timedelta(seconds=1)
"""After so long without another request, what was consumed so far is written to the pod."""

_OF_NO_POD = frozenset({Gate.NO_POD_ADMITTED, Gate.STATIC_POD})
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
        views: Views,
        peers: Peers,
        storage: Storage,
        settings: AllocationSettings,
        say: Callable[[NodeEvent], None],
    ) -> None:
        self._views = views
        self._peers = peers
        self._storage = storage
        self._settings = settings
        self._calls = Calls(Turns(peers.epoch))
        self._rounds = Rounds(peers.clock.now())
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
            raise Refusal(Gate.EMPTY_REQUEST, "The kubelet asked for no slice at all.")
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

    async def _serve(self, ids: tuple[SliceId, ...], match: MatchSettings, call: Call) -> Row:
        grant, facts = await self._decided(len(ids), match, call)
        # Nothing is waited for from here until the pod is claimed: a call beside this one decides.
        call.is_replay = call.turn.yields = grant.replay is not None
        call.row = row = self._row(grant, ids, facts)
        call.oversold = grant.oversold
        if grant.replay is None:
            check_library(facts, grant.candidate.container)
        with self._calls.claiming(row):
            if call.turn.overtaken and not call.is_replay:
                raise overlap(row, is_replay=False)
            if not (call.is_replay and call.overlapped):
                call.step = Step.DIRECTORY
                name = container_directory(row.key.pod_uid, row.key.container)
                await self._storage.hooks.prepare(name, wipe=not call.is_replay)
                call.step = Step.WRITE
                await self._storage.commit(self._change(grant, row))
                if row.lock:
                    self._calls.spend(row)
            # Looked at last: a kubelet whose earlier of two calls is granted dies of it.
            if call.is_replay and (call.overlapped or call.turn.overtaken):
                call.step = Step.ALONE
                await self._calls.turns.until_alone(call.turn)
            if call.turn.overtaken or (call.is_replay and call.overlapped):
                raise overlap(row, is_replay=call.is_replay)
        return row

    async def _decided(
        self, count: int, match: MatchSettings, call: Call
    ) -> tuple[Grant, HookFacts]:
        """Which container it is for, and what it gets and mounts."""
        inquiry = Inquiry(self._views, self._peers, match, patient=True, vain=self._vain)
        try:
            call.step = Step.HOOK
            facts = await self._storage.hooks.facts()
            call.step = Step.MATCH
            grant = await inquiry.grant(count, self._underway)
        except (Refusal, StateError, asyncio.CancelledError):
            self._remember(inquiry, count)
            raise
        if grant is None:  # pragma: no cover -- a patient inquiry decides or raises
            raise Refusal(Gate.OUT_OF_TIME, "The agent could not decide; report this.")
        return grant, facts

    def _remember(self, inquiry: Inquiry, count: int) -> None:
        """What the refusal says of the kubelet's next request.

        A pod that is refused at its admission does not ask again, and which dead container comes
        next is not known.
        """
        now = self._underway()
        self._rounds.doubt(inquiry.may_be_meant(count, now), self._epoch())
        refused = inquiry.in_vain(count, now)
        if refused is not None:
            self._calls.use_up(refused, self._views.pods.value, self._epoch())

    def _row(self, grant: Grant, ids: tuple[SliceId, ...], facts: HookFacts) -> Row:
        """The row as it will stand: a replay keeps its answer and gets the new kubelet's ids."""
        pod, container = grant.candidate.pod, grant.candidate.container
        offered = self._calls.take_offer(ContainerKey(pod.uid, container.name))
        if grant.replay is not None:
            return dataclasses.replace(
                grant.replay,
                slice_ids=tuple(sorted(ids)),
                answered_at=self._peers.clock.now(),
                epoch=self._epoch(),
                confirmed=False,
                offered=offered,
            )
        first = Adoption(pod, container, ids)
        row = self._first_row(first, (grant.group, grant.shares), facts)
        return dataclasses.replace(row, offered=offered, lock=grant.lock)

    async def adopt(self, found: Adoption) -> Row | None:
        """The row of a container that was answered and that the ledger does not know.

        It was answered by another agent, or the ledger was lost; what the scheduler wrote for it
        says what it holds. Where the kubelet has no ids for it, it lost its records, too, and may
        ask again. None: what was written cannot be read, or names a GPU that is not here.
        """
        try:
            facts = await self._storage.hooks.facts()
            paired = pair_groups(found.pod.groups or (), found.pod.asking(found.container.resource))
            for one in paired:
                if one.container == found.container.name:
                    group = (one.group_index, one.shares)
                    row = self._first_row(found, group, facts)
                    epoch = row.epoch if found.ids else KubeletEpoch()
                    return dataclasses.replace(row, confirmed=bool(found.ids), epoch=epoch)
        except AgentError as error:
            log.warning("ledger.not_adopted", pod=found.pod.name, err=str(error))
        return None

    def _first_row(
        self,
        found: Adoption,
        group: tuple[int, tuple[Share, ...]],
        facts: HookFacts,
    ) -> Row:
        """The row of a container that has none: its edits are made here, once."""
        pod, container = found.pod, found.container
        number, shares = group
        granted = cuda_order(map(self._granted, shares))
        request = EditRequest(
            pod_uid=pod.uid,
            container=container.name,
            control_disabled=container.control_disabled,
            shares=granted,
        )
        edits = container_edits(request, self._settings.edits.value, facts)
        return Row(
            key=ContainerKey(pod.uid, container.name),
            namespace=pod.namespace,
            pod=pod.name,
            role=container.role,
            group=number,
            shares=tuple(one.share for one in granted),
            slice_ids=tuple(sorted(found.ids)),
            edits=edits,
            answered_at=self._peers.clock.now(),
            epoch=self._epoch(),
            resource=container.resource,
        )

    def _granted(self, share: Share) -> GrantedShare:
        gpu = self._views.inventory.value.find(share.uuid)
        if gpu is None:  # the inventory changed between the decision and here
            raise Refusal(
                Gate.UNKNOWN_GPU,
                f"GPU {share.uuid} vanished just now; create the pod again.",
                transient=True,
            )
        return GrantedShare(share, gpu.gpu.pci, gpu.registered_mib, gpu.gpu.minor)

    def _change(self, grant: Grant, row: Row) -> Callable[[Ledger], Ledger]:
        """The change of the ledger: the row, and what is owed after it."""
        pod = grant.candidate.pod

        def change(ledger: Ledger) -> Ledger:
            ledger = ledger.put(row)
            if grant.replay is not None:
                return ledger
            rows = ledger.rows_of(pod.uid)
            complete = {one.key.container for one in rows} >= {
                container.name
                for container in pod.asking(row.resource)
                if not is_over(container, row.epoch)
            }
            settle = Effect(
                kind=EffectKind.SETTLE_POD,
                pod_uid=pod.uid,
                namespace=pod.namespace,
                pod=pod.name,
                due=row.answered_at if complete else row.answered_at + QUIET,
                phase=PHASE_SUCCESS if complete else "",
                groups=tuple(sorted(one.group for one in rows)),
            )
            locks = sorted({one.lock for one in rows if one.lock}) if complete else []
            if locks and pod.reusable_name:
                # Another pod of its name may have taken over the lock as it is: the patch of the
                # pod, which names its UID, shows whether it has.
                settle = dataclasses.replace(settle, value=locks.pop())
            ledger = ledger.without_settlements(pod.uid).owe(settle)
            for lock in locks:
                release = dataclasses.replace(
                    settle, kind=EffectKind.RELEASE_LOCK, phase="", groups=(), value=lock
                )
                ledger = ledger.owe(release)
            return ledger

        return change

    def _underway(self) -> Underway:
        ledger, epoch = self._ledger(), self._epoch()
        rounds = self._rounds
        return Underway(
            ledger,
            self._calls.claimed(epoch),
            rounds.in_doubt(epoch, ledger, self._views.pods.value),
            rounds.asked_last(epoch),
            self._calls.spent,
        )

    def _epoch(self) -> KubeletEpoch:
        return self._peers.epoch() or KubeletEpoch()

    def _ledger(self) -> Ledger:
        """The ledger with the rows that are being written."""
        ledger = self._views.ledger.value
        for row in self._calls.pending.values():
            ledger = ledger.put(row)
        return ledger

    def _refused(self, refusal: Refusal, call: Call, count: int) -> None:
        epoch, pods = self._epoch(), self._views.pods.value
        if call.row is not None and call.is_replay:
            self._rounds.refused(call.row, epoch)
        elif call.row is not None and refusal.gate is not Gate.OVERLAP:
            pod = pods.pods.get(call.row.key.pod_uid)
            if pod is None or not has_run(pod):
                self._calls.use_up(call.row.key.pod_uid, pods, epoch)
        self._outcomes.refused(refusal, call.step, count, call.row)
        if refusal.gate in _OF_NO_POD:
            self._say(NodeEvent(REFUSED_EVENT, str(refusal), warning=True))
