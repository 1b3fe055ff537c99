"""One Allocate of plain mode: check the kubelet's ids, row on disk, directory, answer.

The row comes first: a directory without a row would never be removed, a row without a directory
closes by itself. The kubelet is not asked, so that overlapping calls are over within a write; of
those at most the last that it began with is granted, for it would die of any other.
"""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable

from agent.core.allocation.plain import (
    PlainSettings,
    asked_again,
    edits_of,
    grant,
    may_restart,
)
from agent.core.allocation.preference import nearest
from agent.core.allocation.right import renamed
from agent.core.allocation.steps import ALLOCATE_BUDGET, AllocateStep, disk_refusal
from agent.core.cluster.pods import PodUid
from agent.core.containers.container_edits import check_library, container_directory
from agent.core.containers.edits import ContainerEdits, EditSettings, GrantedShare, HookFacts
from agent.core.errors import Refusal, RefusalReason, StateError
from agent.core.inventory.inventory import Inventory
from agent.core.inventory.slices import SliceId, split_slice_id
from agent.core.ports import Clock, KubeletRecords
from agent.core.state.holdings import KubeletEpoch
from agent.core.state.ledger import PLAIN, ContainerKey, Ledger, Row, ShareOrigin
from agent.kit.cell import Cell
from agent.kit.turns import Turn, Turns
from agent.services.allocation.outcomes import Outcomes
from agent.services.allocation.storage import Storage

RECORDS_BUDGET = 0.2
"""Seconds for the kubelet's checkpoint file; after that the answer is a first one."""


@dataclasses.dataclass(eq=False, slots=True)
class _Call:
    """One Allocate under way, by one name of our resource."""

    resource: str
    turn: Turn
    step: AllocateStep = AllocateStep.CHECK


@dataclasses.dataclass(frozen=True, slots=True)
class PlainViews:
    """The facts that an answer is made of.

    `taken` are rows in somebody's hands: being answered again here, or being closed by the
    reconcile. `edits` also has the resource's present name. `epoch` names the kubelet that is there
    now.
    """

    inventory: Cell[Inventory]
    ledger: Cell[Ledger]
    edits: Cell[EditSettings]
    taken: set[ContainerKey]
    epoch: Callable[[], KubeletEpoch | None]
    records: KubeletRecords


class PlainAllocation:
    """Answers the kubelet. Each answer has a row and a directory of its own."""

    def __init__(
        self,
        *,
        views: PlainViews,
        storage: Storage,
        settings: PlainSettings,
        clock: Clock,
        chance: random.Random,
    ) -> None:
        self._views = views
        self._storage = storage
        self._settings = settings
        self._clock = clock
        self._chance = chance
        self._pending: dict[ContainerKey, Row] = {}
        self._turns = Turns(views.epoch)
        self._outcomes = Outcomes()
        self.results = self._outcomes.results

    async def allocate(
        self, ids: tuple[SliceId, ...], resource: str | None = None
    ) -> ContainerEdits:
        """What the container with these ids receives. Raises Refusal.

        `resource` is the name that is asked by, None: the present one.
        """
        with self._turns.asked(ids) as turn:
            turn.yields = turn.doubted
            call = _Call(resource or self._views.edits.value.resource, turn)
            try:
                async with asyncio.timeout(ALLOCATE_BUDGET):
                    row, is_replay = await self._serve(ids, call)
            except Refusal as refusal:
                self._outcomes.refused(refusal, call.step, len(ids))
                raise
            except (TimeoutError, StateError) as error:
                translated = _refusal_of(error, call.step)
                self._outcomes.refused(translated, call.step, len(ids))
                raise translated from error
        gpus = list(dict.fromkeys(pair[0] for text in ids if (pair := split_slice_id(text))))
        self._outcomes.answered(is_replay=is_replay, uid=row.key.pod_uid, count=len(ids), gpus=gpus)
        return row.edits

    async def prefer(
        self,
        available: tuple[SliceId, ...],
        must_include: tuple[SliceId, ...],
        size: int,
        _: str | None = None,
    ) -> tuple[SliceId, ...]:
        """`size` of the offered ids, on GPUs near to each other; none where that cannot be.

        Ids of answers that an earlier kubelet never booked are as good as free: whoever asks again
        is best answered as before. What was just offered to another container is offered last, for
        the kubelet marks it only when it asks for it.
        """
        turn = self._turns.begin()
        epoch = self._views.epoch()
        held = self._held(lambda row: row.confirmed or row.adopted or row.epoch == epoch)
        gpus = {one.uuid: one.gpu for one in self._views.inventory.value.gpus}
        offered = self._turns.offered()
        left = tuple(text for text in available if text not in offered)
        chosen = nearest(left, must_include, size, gpus, held)
        chosen = chosen or nearest(available, must_include, size, gpus, held)
        turn.ids = frozenset(chosen)
        return chosen

    async def _serve(self, ids: tuple[SliceId, ...], call: _Call) -> tuple[Row, bool]:
        facts = await self._storage.hooks.facts()
        granted = grant(ids, self._views.inventory.value, self._held(lambda _: True))
        answer = None
        if not (call.turn.overtaken or call.turn.yields):
            answer = await self._written(ids, call, (granted, facts))
        # Looked at last: a kubelet whose earlier of two calls is granted dies of it.
        if answer is None or call.turn.overtaken:
            call.step = AllocateStep.ALONE  # and until then it begins with nothing else of this pod
            await self._turns.until_alone(call.turn)
            raise _overlap()
        return answer

    async def _written(
        self,
        ids: tuple[SliceId, ...],
        call: _Call,
        made_of: tuple[tuple[GrantedShare, ...], HookFacts],
    ) -> tuple[Row, bool]:
        """The row that is answered, on disk and with its directory, and whether it is a replay."""
        granted, facts = made_of
        with contextlib.ExitStack() as claims:
            again = await self._asked_again(ids, call.resource, claims)
            row = again or self._first(ids, granted, (facts, call.resource))
            self._pending[row.key] = row
            claims.callback(self._pending.pop, row.key)
            call.step = AllocateStep.WRITE
            await self._storage.commit(lambda ledger: ledger.put(row))
            if row.has_directory:
                call.step = AllocateStep.DIRECTORY
                await self._storage.hooks.prepare(
                    container_directory(row.key.pod_uid, row.key.container), wipe=False
                )
        return row, again is not None

    async def _asked_again(
        self, ids: tuple[SliceId, ...], resource: str, claims: contextlib.ExitStack
    ) -> Row | None:
        """The row to answer again, as it will stand, or None. It stays claimed by `claims`.

        Raises:
            Refusal: by a former name, a new container asks.
        """
        epoch, taken = self._views.epoch(), self._views.taken
        rows = self._views.ledger.value.under(resource).rows
        present = self._views.edits.value.resource
        if resource != present and not may_restart(ids, rows, epoch):
            raise renamed("This pod", resource, present)
        free = (row for row in rows if row.key not in taken and row.key not in self._pending)
        row = asked_again(ids, free, epoch) if epoch else None
        if epoch is None or row is None:
            return None
        taken.add(row.key)
        claims.callback(taken.discard, row.key)
        try:
            async with asyncio.timeout(RECORDS_BUDGET):
                recorded = await self._views.records.read(resource)
        except TimeoutError:
            return None
        if recorded is None or frozenset(ids) in recorded.values():
            return None
        return dataclasses.replace(row, answered_at=self._clock.now(), epoch=epoch)

    def _first(
        self,
        ids: tuple[SliceId, ...],
        granted: tuple[GrantedShare, ...],
        made: tuple[HookFacts, str],
    ) -> Row:
        """A row of its own, with its answer."""
        # Without dashes it is no UID of the API server's: hami mode, which sweeps directories of
        # pods that are gone, leaves this one alone.
        uid = PodUid(f"{self._chance.getrandbits(128):032x}")
        facts, resource = made
        settings = self._settings, self._views.edits.value
        if self._settings.memory_limits:
            check_library(facts)
        return Row(
            key=ContainerKey(uid, PLAIN),
            holder=None,
            slice_ids=tuple(sorted(ids)),
            shares=tuple(one.share for one in granted) if self._settings.memory_limits else (),
            edits=edits_of(uid, granted, settings, facts),
            answered_at=self._clock.now(),
            epoch=self._views.epoch() or KubeletEpoch(),
            origin=ShareOrigin.KUBELET,
            resource=resource,
        )

    def _held(self, counts: Callable[[Row], bool]) -> frozenset[SliceId]:
        """The ids of all rows that count, those included that are being written."""
        ledger = self._views.ledger.value
        for row in self._pending.values():
            ledger = ledger.put(row)
        return frozenset(text for row in filter(counts, ledger.rows) for text in row.slice_ids)


def _overlap() -> Refusal:
    """What a call says that was overtaken: the kubelet does not tell a new pod from an old one."""
    return Refusal(
        RefusalReason.OVERLAP,
        "The kubelet asks for several containers at once after it lost its records, and would die "
        "of this answer; it asks again for a container that ran in a few seconds, and a new pod is "
        "started again by its controller.",
        transient=True,
    )


def _refusal_of(error: TimeoutError | StateError, step: AllocateStep) -> Refusal:
    """What the pod's owner reads when a step failed, or was still going on at the end."""
    return _overlap() if step is AllocateStep.ALONE else disk_refusal(error, step)
