"""Answers Allocate: decide, write, answer; beside HAMi's scheduler."""

import asyncio
import contextlib
import datetime as dt
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import NoReturn, Protocol

import msgspec
import structlog

from agent.allocate.calls import (
    AllocateCall,
    AllocateCalls,
    AllocationPeers,
    AllocationViews,
    Underway,
    Waits,
    overlap,
    refusal_of,
)
from agent.allocate.candidates import Grant, KubeletStart, pair_groups
from agent.allocate.edits import EditRequest, check_library, container_edits, cuda_order
from agent.allocate.inquiry import Inquiry
from agent.allocate.prefer import nearest, steer
from agent.allocate.room import Shortage
from agent.allocate.steps import DISK_BUDGET, VAIN, VAIN_REFILL, AllocateStep, MatchSettings
from agent.cluster import NodeEvent
from agent.errors import AgentError, Refusal, RefusalReason, StateError
from agent.kit.cell import Cell
from agent.kit.tasks import Allowance
from agent.kit.timing import Budget, Tally
from agent.kit.turns import Turn, Turns
from agent.ledger import (
    ContainerEdits,
    ContainerKey,
    Decider,
    EditSettings,
    GrantedShare,
    Holder,
    HookFacts,
    KubeletEpoch,
    Ledger,
    Row,
    container_directory,
)
from agent.model import Inventory, Share, SliceId
from agent.ports import Clock, HookDirs
from agent.reconcile.rules import DEADLINE, Adoption
from agent.settle import REFUSED_EVENT

# Counts and logs how each Allocate ended.

log = structlog.get_logger(__name__)


OVERSOLD_EVENT = "GpuOversold"


def oversold(short: Shortage) -> NodeEvent:
    """The Event that the scheduler has given out more of a GPU than it has."""
    what, total, limit = short.amounts
    text = (
        f"HAMi's scheduler has given out {total} of {what} of {short.gpu.gpu.title}, which has "
        f"{limit}: for a pod with sidecars or init containers it counts less than runs at one "
        "time. Delete one of the pods on this GPU, or let them ask for less."
    )
    return NodeEvent(OVERSOLD_EVENT, text, warning=True)


class Outcomes:
    """Counts and logs each answer and refusal once."""

    def __init__(self) -> None:
        self.results = Tally(
            "allocations_total",
            "Answers to Allocate by result and reason.",
            ("result", "reason"),
            expected=[("refused", gate.name.lower()) for gate in RefusalReason],
        )

    def answered(self, row: Row, *, is_replay: bool) -> None:
        """Report an answer."""
        result = "replay" if is_replay else "ok"
        self.results.add(result, "")
        gpus, count = list(dict.fromkeys(row.gpus)), len(row.slice_ids)
        log.info("alloc.answered", result=result, **whose(row), count=count, gpus=gpus)

    def refused(
        self, refusal: Refusal, step: AllocateStep, count: int, row: Row | None = None
    ) -> None:
        """Report a refusal of `count` slices. `row`: what would have been answered, if known."""
        self.results.add("refused", refusal.gate.name.lower())
        log.warning(
            "alloc.refused",
            gate=refusal.gate.value,
            step=step.value,
            count=count,
            reason=refusal.sentence,
            **({} if row is None else whose(row)),
        )


def whose(row: Row) -> dict[str, str]:
    """The log fields that name a row's container; its drawn UID while no holder is known."""
    if row.holder is None:
        return {"uid": row.key.pod_uid}
    return {"ns": row.namespace, "pod": row.pod, "ctr": row.holder.container}


# The storage that an answer needs.


class Storage(msgspec.Struct, frozen=True):
    """Commits changes of the ledger (raises StateError) and makes host directories."""

    commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]]
    hooks: HookDirs


# Makes the ledger rows of answered containers. A row's edits are made once and kept in it.


class Rows:
    """Makes rows. `edits` also has the resource name; `epoch`: the present kubelet instance."""

    def __init__(
        self,
        *,
        inventory: Cell[Inventory],
        edits: Cell[EditSettings],
        hooks: HookDirs,
        epoch: Callable[[], KubeletEpoch],
        clock: Clock,
    ) -> None:
        self._inventory = inventory
        self._edits = edits
        self._hooks = hooks
        self._epoch = epoch
        self._clock = clock

    def granted(
        self, grant: Grant, ids: tuple[SliceId, ...], facts: HookFacts, *, offered: bool
    ) -> Row:
        """The row of a grant. A replay keeps its answer and gets the ids of this call."""
        if grant.replay is not None:
            return msgspec.structs.replace(
                grant.replay,
                slice_ids=tuple(sorted(ids)),
                answered_at=self._clock.now(),
                epoch=self._epoch(),
                confirmed=False,
                offered=offered,
            )
        found = Adoption(grant.candidate.pod, grant.candidate.container, ids)
        row = self._first(found, (grant.group, grant.shares), facts)
        return msgspec.structs.replace(row, offered=offered, lock=grant.lock)

    async def adopted(self, found: Adoption) -> Row | None:
        """The row of a container that was answered and that the ledger does not know.

        Another agent answered it, or the ledger was lost. The scheduler's annotation says what it
        holds. If the kubelet has no ids for it, the kubelet lost its checkpoint and may ask again.
        None: the annotation cannot be read, or names a GPU that is not on this node.
        """
        try:
            async with asyncio.timeout(DEADLINE):
                facts = await self._hooks.facts()
            paired = pair_groups(found.pod.groups or (), found.pod.asking(found.container.resource))
            for pair in paired:
                if pair.container == found.container.name:
                    group = (pair.group_index, pair.shares)
                    row = self._first(found, group, facts)
                    epoch = row.epoch if found.ids else KubeletEpoch()
                    return msgspec.structs.replace(row, confirmed=bool(found.ids), epoch=epoch)
        except (AgentError, TimeoutError) as error:
            why = str(error) or "out of time"
            log.warning("ledger.not_adopted", pod=found.pod.name, err=why)
        return None

    def _first(
        self,
        found: Adoption,
        group: tuple[int, tuple[Share, ...]],
        facts: HookFacts,
    ) -> Row:
        """A new row, with its edits. `group`: its position in `…-allocated`, and its shares."""
        pod, container = found.pod, found.container
        number, shares = group
        granted = cuda_order(map(self._share, shares))
        request = EditRequest(
            pod_uid=pod.uid,
            container=container.name,
            control_disabled=container.control_disabled,
            shares=granted,
        )
        return Row(
            key=ContainerKey(pod.uid, container.name),
            holder=Holder(pod.namespace, pod.name, container.name),
            role=container.role,
            group=number,
            shares=tuple(grant.share for grant in granted),
            slice_ids=tuple(sorted(found.ids)),
            edits=container_edits(request, self._edits.value, facts),
            answered_at=self._clock.now(),
            epoch=self._epoch(),
            resource=container.resource,
            priority=container.priority,
        )

    def _share(self, share: Share) -> GrantedShare:
        gpu = self._inventory.value.find(share.uuid)
        if gpu is None:  # the inventory changed between the decision and here
            raise Refusal(
                RefusalReason.UNKNOWN_GPU,
                f"GPU {share.uuid} was removed during this call; create the pod again.",
                transient=True,
            )
        return GrantedShare(share, gpu.gpu.pci, gpu.registered_mib, gpu.gpu.minor, gpu.gpu.index)


# Answers Allocate in both modes: decide, claim the row, commit it, answer.
#
# The host directory is made and the row is durable before the kubelet gets the answer.

_OF_NO_POD = frozenset(
    {
        RefusalReason.NO_POD_ADMITTED,
        RefusalReason.STATIC_POD,
        RefusalReason.MANY_PODS_ADMITTED,
    }
)
"""Refusals that no single pod can show: their Event is posted about the Node."""


class ShareSource(Protocol):
    """Decides what a container gets. `calls`: the Allocates under way."""

    calls: AllocateCalls

    async def decide(self, ids: tuple[SliceId, ...], call: AllocateCall, /) -> None:
        """Set the row of the call, unless another call overtook it. Raises Refusal, StateError."""
        ...

    def refused(self, refusal: Refusal, call: AllocateCall, /) -> None:
        """Record that the call was refused."""
        ...

    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int, /
    ) -> tuple[SliceId, ...]:
        """The best `size` of the available ids."""
        ...


class Allocation:
    """Answers the kubelet. Calls may overlap; each claims its row before it waits for the disk.

    `say` posts an Event about the Node. `noted` hears of each refusal, with its row if known.
    """

    def __init__(
        self,
        source: ShareSource,
        storage: Storage,
        say: Callable[[NodeEvent], None],
        noted: Callable[[Refusal, Row | None], None] = lambda _refusal, _row: None,
    ) -> None:
        self._source = source
        self._calls = source.calls
        self._storage = storage
        self._say = say
        self._noted = noted
        self._outcomes = Outcomes()
        self.results = self._outcomes.results
        self.waits = source.calls.waits

    async def allocate(self, ids: tuple[SliceId, ...]) -> ContainerEdits:
        """The edits for the container that the kubelet is admitting. Raises Refusal.

        `ids`: the kubelet's slice ids, at least one.
        """
        with self._calls.entered(ids) as call:
            try:
                row = await self._serve(ids, call)
            except Refusal as refusal:
                self._refused(refusal, call, len(ids))
                raise
            except (TimeoutError, StateError) as error:
                translated = refusal_of(error, call)
                self._refused(translated, call, len(ids))
                raise translated from error
        if call.oversold is not None:
            self._say(oversold(call.oversold))
        self._outcomes.answered(row, is_replay=call.is_replay)
        return row.edits

    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """The best `size` of the available ids.

        Never refuses: an error here would fail the pod's admission and leak ids in the kubelet.
        """
        return await self._source.prefer(available, must_include, size)

    async def _serve(self, ids: tuple[SliceId, ...], call: AllocateCall) -> Row:
        await self._source.decide(ids, call)
        # No await from here until the row is claimed: another call would decide on the same pod.
        row = call.row
        if row is None:
            raise await self._overtaken(call)
        with self._calls.claiming(row):
            if not call.is_lost:
                await self._write(row, call)
            # Checked last: granting the earlier of two overlapping calls crashes the kubelet.
            if call.is_lost:
                raise await self._overtaken(call)
        return row

    async def _write(self, row: Row, call: AllocateCall) -> None:
        """Make the container's directory and commit the row.

        In plain mode the row comes first: only the row says later that the directory can be
        removed. A row without a directory is closed like any other.
        """
        is_row_first = row.decided_by is Decider.KUBELET
        if not is_row_first:
            await self._make_directory(row, call, wipe=not call.is_replay)
        call.step = AllocateStep.WRITE
        async with call.disk.within():
            with self.waits.waiting("disk"):
                await self._storage.commit(lambda ledger: ledger.put(row))
        if row.lock:
            self._calls.spend(row)
        if is_row_first and row.has_directory:
            await self._make_directory(row, call, wipe=False)

    async def _make_directory(self, row: Row, call: AllocateCall, *, wipe: bool) -> None:
        call.step = AllocateStep.DIRECTORY
        name = container_directory(row.key.pod_uid, row.key.container)
        async with call.disk.within():
            with self.waits.waiting("directory"):
                await self._storage.hooks.prepare(name, wipe=wipe)

    async def _overtaken(self, call: AllocateCall) -> Refusal:
        """The refusal of a call that must not be granted.

        If the kubelet will ask again, this waits until no other call is under way. Until then the
        kubelet begins no other container of the pod.
        """
        if call.may_come_again:
            await self._calls.turns.until_alone(call.turn)  # each of them has its deadlines
        return overlap(call)

    def _refused(self, refusal: Refusal, call: AllocateCall, count: int) -> None:
        self._source.refused(refusal, call)
        self._outcomes.refused(refusal, call.step, count, call.row)
        self._noted(refusal, call.row)
        if refusal.gate in _OF_NO_POD:
            self._say(NodeEvent(REFUSED_EVENT, str(refusal), warning=True))


# Hami mode: decides what a container gets by the annotation that HAMi's scheduler wrote.

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


# After a lost kubelet checkpoint PodResources says "known, no slices" of a pod that runs, of one
# whose container died, and of one that is being admitted. What the kubelet asks for depends on
# what it saw when it started. The agent looks when the kubelet begins to take its list (run):
#
# - The kubelet takes the set of running containers from the runtime, 0.35 s before its socket
#   appears. The agent reads the cgroups, if the list was taken within 0.5 s after the socket.
# - It admits the pods that were there, one by one, from 0.9 s after its socket on, and asks in
#   the order of the spec for each container that has no record and is not in that set, also if it
#   has died since. A pod without a cgroup was dead: its first container that has not started
#   since is next.
# - It asks for nothing in an admission before it took the list: it starts those pods unasked.
#   Only a pod that was made since then counts as new.
# - It asks for any container that dies later, in parallel and in any order; after a refusal for
#   the next one, and 8 to 10 s later again. All others are unknown: only a single possible
#   container is served. A status proves no death: the former kubelet may have started the
#   container again without telling.
#
# Refused (HA-2002): several possible containers of one count, in one pod or in several. A new pod
# that holds the node lock is served all the same: the kubelet knew it when it began the call, and
# no other is new. Refused (HA-2010) while the API server cannot be asked: a pod that has run, for
# a pod that no view shows may be the one.


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

    async def decide(self, ids: tuple[SliceId, ...], call: AllocateCall) -> None:
        """Set the row of the call, from which its effects follow. Raises Refusal."""
        grant, facts = await self._granted(len(ids), call)
        call.is_replay = call.turn.yields = grant.replay is not None
        call.oversold = grant.oversold
        offered = self.calls.take_offer(grant.key)
        call.row = self._rows.granted(grant, ids, facts, offered=offered)
        if not call.is_replay:
            check_library(facts, grant.candidate.container)

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
