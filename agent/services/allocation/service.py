"""Answers Allocate in both modes: decide, claim the row, commit it, answer.

The host directory is made and the row is durable before the kubelet gets the answer.
"""

from collections.abc import Callable
from typing import Protocol

from agent.core.allocation.steps import AllocateStep
from agent.core.cluster.changes import NodeEvent
from agent.core.containers.edits import ContainerEdits, container_directory
from agent.core.errors import Refusal, RefusalReason, StateError
from agent.core.inventory.slices import SliceId
from agent.core.reconcile.settlement import REFUSED_EVENT
from agent.core.state.ledger import Decider, Ledger, Row
from agent.services.allocation.calls import AllocateCall, AllocateCalls, overlap, refusal_of
from agent.services.allocation.outcomes import Outcomes, oversold
from agent.services.allocation.storage import Storage

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

    async def decide(
        self, ids: tuple[SliceId, ...], call: AllocateCall, /
    ) -> Callable[[Ledger], Ledger] | None:
        """Set the row of the call. Returns the change of the ledger to commit.

        None: another call overtook it before the decision. Raises Refusal, StateError.
        """
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
        change = await self._source.decide(ids, call)
        # No await from here until the row is claimed: another call would decide on the same pod.
        if change is None or call.row is None:
            raise await self._overtaken(call)
        row = call.row
        with self._calls.claiming(row):
            if not call.is_lost:
                await self._write(row, change, call)
            # Checked last: granting the earlier of two overlapping calls crashes the kubelet.
            if call.is_lost:
                raise await self._overtaken(call)
        return row

    async def _write(
        self, row: Row, change: Callable[[Ledger], Ledger], call: AllocateCall
    ) -> None:
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
                await self._storage.commit(change)
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
