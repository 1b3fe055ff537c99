"""Plain mode: decides what a container gets by the slice ids that the kubelet names.

The agent does not know which pod asks. It does not ask PodResources, which cannot tell a new pod
from an old one. The kubelet crashes when the earlier of two overlapping calls is granted.
"""

import random
from collections.abc import Callable, Iterable

import msgspec

from agent.core.allocation.plain import PlainSettings, asked_again, edits_of, grant
from agent.core.allocation.preference import nearest
from agent.core.allocation.steps import AllocateStep
from agent.core.cluster.pods import PodUid
from agent.core.containers.container_edits import check_library
from agent.core.containers.edits import EditSettings, GrantedShare, HookFacts
from agent.core.errors import Refusal
from agent.core.inventory.inventory import Inventory
from agent.core.inventory.slices import SliceId
from agent.core.ports import Clock, HookDirs, KubeletRecords
from agent.core.state.holdings import KubeletEpoch
from agent.core.state.ledger import PLAIN, ContainerKey, Decider, Ledger, Row
from agent.kit.cell import Cell
from agent.kit.running_time import Lag
from agent.kit.turns import Turns
from agent.services.allocation.calls import AllocateCall, AllocateCalls

RECORDS_BUDGET = 0.2
"""Seconds for reading the kubelet's checkpoint file. After that the call gets a new row."""


class KubeletViews(msgspec.Struct, frozen=True):
    """The facts that a decision reads. `edits` also has the resource name.

    `epoch`: the present kubelet instance.
    """

    inventory: Cell[Inventory]
    ledger: Cell[Ledger]
    edits: Cell[EditSettings]
    epoch: Callable[[], KubeletEpoch | None]


class KubeletPeers(msgspec.Struct, frozen=True):
    """The ports that a decision uses. `lag`: extends the deadlines of all calls."""

    records: KubeletRecords
    hooks: HookDirs
    clock: Clock
    chance: random.Random
    lag: Lag = msgspec.field(default_factory=Lag)


class KubeletShares:
    """A ShareSource: each slice that the kubelet names is a part of its GPU."""

    def __init__(self, views: KubeletViews, peers: KubeletPeers, settings: PlainSettings) -> None:
        self._views = views
        self._peers = peers
        self._settings = settings
        self.calls = AllocateCalls(Turns(views.epoch), peers.lag)

    async def decide(
        self, ids: tuple[SliceId, ...], call: AllocateCall
    ) -> Callable[[Ledger], Ledger] | None:
        """Set the row of the call. None: another call overtook it. Raises Refusal."""
        # A call that may have been overtaken is refused too while another is under way.
        call.turn.yields = call.turn.doubted
        call.overlapped |= call.turn.doubted
        async with call.disk.within():
            with self.calls.waits.waiting("hook-path"):
                facts = await self._peers.hooks.facts()
        call.step = AllocateStep.CHECK
        held = _ids_of(self.calls.on_their_way(self._views.ledger.value).rows)
        granted = grant(ids, self._views.inventory.value, held)
        if call.is_lost:
            return None
        again = await self._asked_again(ids)
        call.is_replay = again is not None
        call.row = row = again or self._first(ids, granted, facts)
        return lambda ledger: ledger.put(row)

    def refused(self, refusal: Refusal, call: AllocateCall) -> None:
        """Do nothing: the pod is not known."""

    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """`size` of the available ids, on GPUs near to each other; empty if that is impossible.

        Ids of answers that an earlier kubelet never booked count as free: a container that asks
        again should get the same ids. Ids that were just offered to another container come last,
        because the kubelet marks them as used only at the Allocate.
        """
        turn = self.calls.turns.begin()
        epoch = self._views.epoch()
        rows = self.calls.on_their_way(self._views.ledger.value).rows
        held = _ids_of(row for row in rows if row.confirmed or row.epoch == epoch)
        gpus = {shared.uuid: shared.gpu for shared in self._views.inventory.value.gpus}
        offered = self.calls.turns.offered()
        fresh = tuple(slice_id for slice_id in available if slice_id not in offered)
        chosen = nearest(fresh, must_include, size, gpus, held)
        chosen = chosen or nearest(available, must_include, size, gpus, held)
        turn.ids = frozenset(chosen)
        return chosen

    async def _asked_again(self, ids: tuple[SliceId, ...]) -> Row | None:
        """The row to answer again, with its new time and epoch, or None."""
        epoch, taken = self._views.epoch(), self.calls.taken
        free = (row for row in self._views.ledger.value.rows if row.key not in taken)
        row = asked_again(ids, free, epoch) if epoch else None
        if epoch is None or row is None:
            return None
        taken.add(row.key)
        try:
            async with self.calls.lag.within(RECORDS_BUDGET):
                recorded = await self._peers.records.read(self._views.edits.value.resource)
        except TimeoutError:
            return None
        finally:
            taken.discard(row.key)
        if recorded is None or frozenset(ids) in recorded.values():
            return None
        return msgspec.structs.replace(row, answered_at=self._peers.clock.now(), epoch=epoch)

    def _first(
        self, ids: tuple[SliceId, ...], granted: tuple[GrantedShare, ...], facts: HookFacts
    ) -> Row:
        """A new row with its answer."""
        # A UID without dashes is not one of the API server's. So hami mode, which removes
        # directories of deleted pods, does not remove this one.
        uid = PodUid(f"{self._peers.chance.getrandbits(128):032x}")
        edits, has_limits = self._views.edits.value, self._settings.memory_limits
        if has_limits:
            check_library(facts)
        return Row(
            key=ContainerKey(uid, PLAIN),
            holder=None,
            shares=tuple(grant.share for grant in granted) if has_limits else (),
            slice_ids=tuple(sorted(ids)),
            edits=edits_of(uid, granted, self._settings, edits, facts),
            answered_at=self._peers.clock.now(),
            epoch=self._views.epoch() or KubeletEpoch(),
            decided_by=Decider.KUBELET,
            resource=edits.resource,
        )


def _ids_of(rows: Iterable[Row]) -> frozenset[SliceId]:
    return frozenset(slice_id for row in rows for slice_id in row.slice_ids)
