"""Plain mode on a node of fakes: a kubelet's books and checkpoint file, ledger, virtual time."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Sequence

import pytest

from agent.allocate.plain import PlainAllocation, PlainSettings
from agent.allocate.service import DISK_BUDGET
from agent.cluster import NodeEvent, PodTable
from agent.errors import Refusal, RefusalReason, StateError
from agent.kit.cell import Cell
from agent.kit.timing import BEGUN, CLOSE, IdleWaiter
from agent.ledger import (
    ContainerEdits,
    ContainerKey,
    EditSettings,
    Holder,
    KubeletEpoch,
    Ledger,
    Row,
    State,
)
from agent.model import Inventory, SliceId
from agent.reconcile import QUIET, Reconcile
from agent.state import StateService
from tests.builders import NOON, a_pod_uid, an_inventory
from tests.fakes.clock import LoopClock
from tests.fakes.disk import GatedDisk
from tests.fakes.kubelet_side import RESOURCE, FakeHookDirs, FakeWitness
from tests.services.at_work import at_work
from tests.unit.core.allocation.plain_scene import EPOCH, HOLDER, a_plain_row, holds, ids

BYSTANDER = Holder("kube-system", "proxy", "main")
"""Some pod without a GPU is on every node, once its kubelet knows its pods."""


class FakeHolds:
    """The ids in the kubelet's checkpoint file; None: it is absent or unreadable."""

    def __init__(self) -> None:
        self.ids: list[frozenset[SliceId]] | None = []
        self.hung = False

    async def read(self, resource: str) -> dict[ContainerKey, frozenset[SliceId]] | None:
        assert RESOURCE == resource
        if self.hung:
            await asyncio.Event().wait()
        keys = (ContainerKey(a_pod_uid(number), "main") for number in itertools.count())
        return None if self.ids is None else dict(zip(keys, self.ids, strict=False))


class PlainNode:
    """What a test of plain mode holds in its hands."""

    def __init__(self, ledger: Ledger, *, limits: bool) -> None:
        self.clock = LoopClock(NOON)
        self.disk = GatedDisk()
        self.state = StateService(disk=self.disk, recovered=State(ledger=ledger), boot_id="b")
        self.inventory: Cell[Inventory] = Cell(an_inventory(count=2))
        self.witness = FakeWitness()
        self.witness.pods[BYSTANDER.namespace, BYSTANDER.pod] = holds(BYSTANDER)
        self.holds = FakeHolds()
        self.hooks = FakeHookDirs()
        self.calls = IdleWaiter()
        self.epoch: Cell[KubeletEpoch | None] = Cell(EPOCH)
        self.edits = Cell(EditSettings())
        chance = random.Random(7)  # noqa: S311 -- a seed makes a test repeatable
        self.said: list[NodeEvent] = []
        self.service = PlainAllocation(
            commit=self.state.commit,
            say=self.said.append,
            inventory=self.inventory,
            ledger=self.state.ledger,
            edits=self.edits,
            epoch=lambda: self.epoch.value,
            hooks=self.hooks,
            clock=self.clock,
            chance=chance,
            settings=PlainSettings(memory_limits=limits),
        )
        self.reconcile = Reconcile(
            pods=Cell(PodTable(synced=True)),
            ledger=self.state.ledger,
            epoch=self.epoch,
            taken=self.service.taken,
            calls=self.calls,
            witness=self.witness,
            records=self.holds.read,
            hooks=self.hooks,
            clock=self.clock,
            resource=Cell(EditSettings().resource),
            adopt=None,
            commit=self.state.commit,
            say=self.said.append,
        )

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.state.ledger.value.rows

    @property
    def results(self) -> dict[tuple[str, ...], int]:
        return dict(self.service.results.items())

    def directories(self) -> set[str]:
        """The directories that the rows have."""
        return {row.directory for row in self.rows if row.directory}

    def book(self, holder: Holder, ids: Sequence[SliceId]) -> None:
        """The kubelet takes the answer into its books and its checkpoint."""
        key = (holder.namespace, holder.pod)
        self.witness.pods[key] = holds(holder, *ids)
        if self.holds.ids is not None:
            self.holds.ids.append(frozenset(ids))

    def end(self, holder: Holder) -> None:
        """The holder's pod ends; the kubelet's file is not written for that."""
        del self.witness.pods[(holder.namespace, holder.pod)]

    def lose_checkpoint(self, epoch: KubeletEpoch) -> None:
        """A new kubelet that knows its pods, and none of their ids."""
        self.holds.ids = None
        self.witness.pods = {
            key: holds(Holder(*key, next(iter(pod.containers))))
            for key, pod in self.witness.pods.items()
        }
        self.epoch.set(epoch)


@contextlib.asynccontextmanager
async def a_node(*rows: Row, limits: bool = True) -> AsyncIterator[PlainNode]:
    """A node whose ledger is being written and reconciled."""
    node = PlainNode(Ledger(rows), limits=limits)
    async with at_work(node.state.run, node.reconcile.run):
        yield node


# Answers of plain mode: durable first, each with a row and a directory of its own.


def directory(edits: ContainerEdits | Refusal) -> str:
    """The directory of its own that an answer mounts."""
    assert isinstance(edits, ContainerEdits)
    (found,) = {one.host_path for one in edits.mounts if "/containers/" in one.host_path}
    return found.rpartition("/")[2]


async def refused(node, wanted):
    with pytest.raises(Refusal) as caught:
        await node.service.allocate(wanted)
    return caught.value


async def outcome(node, wanted) -> ContainerEdits | Refusal:
    try:
        return await node.service.allocate(wanted)
    except Refusal as refusal:
        return refusal


async def outcomes(node, *wanted, apart=2 * CLOSE) -> list[ContainerEdits | Refusal]:
    """What calls that are under way at once are told, in the order in which they came."""
    node.disk.gate.clear()
    calls = []
    async with asyncio.TaskGroup() as group:
        for one in wanted:
            calls.append(group.create_task(outcome(node, one)))
            await asyncio.sleep(apart)
        node.disk.gate.set()
    return [call.result() for call in calls]


async def test_of_calls_that_overlap_the_last_is_granted_and_in_the_end_all_whatever_their_ids():
    async with a_node() as node:
        given, waiting = [], 6
        while waiting:
            *earlier, last = await outcomes(node, *[ids(0)] * waiting)

            assert {RefusalReason.OVERLAP} >= {one.gate for one in earlier}
            assert all(one.transient for one in earlier)
            given.append(directory(last))
            waiting -= 1
            await asyncio.sleep(8)

        assert 6 == len(set(given))


async def test_of_calls_that_begin_in_one_moment_none_is_granted_and_one_when_it_is_repeated():
    """Which of them the kubelet began last cannot be known, and it crashes for the other."""
    async with a_node() as node:
        found = await outcomes(node, ids(0), ids(1), apart=CLOSE / 2)

        assert {RefusalReason.OVERLAP} == {one.gate for one in found}
        assert directory(await node.service.allocate(ids(1)))


async def test_no_answer_is_given_before_its_row_is_on_disk():
    async with a_node() as node:
        node.disk.gate.clear()
        async with asyncio.TaskGroup() as group:
            call = group.create_task(node.service.allocate(ids(0)))
            await asyncio.sleep(DISK_BUDGET - 0.1)
            assert not call.done()
            assert set() == node.hooks.names
            node.disk.gate.set()

        assert call.result() == node.rows[0].edits


async def test_a_container_that_was_begun_before_another_one_is_not_granted_after_it():
    async with a_node() as node:
        first = await node.service.prefer(ids(0, 1, 2), (), 1)
        await asyncio.sleep(2 * CLOSE)
        second = await node.service.prefer(ids(0, 1, 2), (), 1)

        assert first != second
        assert RefusalReason.OVERLAP is (await refused(node, first)).gate
        assert directory(await node.service.allocate(second))
        assert directory(await node.service.allocate(first)), "the kubelet asks again"


async def test_of_preferences_asked_in_one_moment_no_request_is_granted_until_it_is_repeated():
    """The kubelet may have begun them in the other order."""
    async with a_node() as node:
        wanted = [await node.service.prefer(ids(0, 1, 2), (), 1) for _ in range(2)]

        assert {RefusalReason.OVERLAP} == {(await refused(node, one)).gate for one in wanted}
        assert directory(await node.service.allocate(wanted[1]))


async def test_a_directory_that_cannot_be_made_refuses_and_its_row_closes_by_itself():
    async with a_node() as node:
        node.hooks.failure = StateError("vgpu is a link")

        refusal = await refused(node, ids(0))
        node.hooks.failure = None

        assert RefusalReason.HOST_DIRECTORY is refusal.gate
        assert "vgpu is a link" in refusal.sentence
        await asyncio.sleep(130)
        assert () == node.rows


# Plain mode and the kubelet agree: after bursts, at each kubelet, and when a pod ends.
HELD = a_plain_row(holder=HOLDER)


async def serve(node, wanted, holder):
    """The kubelet asks, and books the answer."""
    with node.calls.busy():
        edits = await node.service.allocate(wanted)
    node.book(holder, wanted)
    return edits


async def test_no_list_is_asked_for_while_allocates_run_or_have_just_run():
    async with a_node() as node:
        await asyncio.sleep(5)
        before = node.witness.lists
        for number in range(20):
            await serve(node, ids(number % 10, gpu=number // 10), Holder("a", f"p{number}", "c"))
            await asyncio.sleep(QUIET - 0.1)
            assert before == node.witness.lists

        await asyncio.sleep(1)
        assert before + 1 == node.witness.lists
        assert all(row.holder for row in node.rows)


async def test_a_slice_that_was_offered_and_not_asked_for_is_free_again_seconds_later():
    async with a_node() as node:
        assert ids(0) == await node.service.prefer(ids(0, 1), (), 1)
        assert ids(1) == await node.service.prefer(ids(0, 1), (), 1)
        await asyncio.sleep(BEGUN)
        assert ids(0) == await node.service.prefer(ids(0, 1, 2), (), 1)
