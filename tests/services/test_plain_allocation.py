"""Answers of plain mode: durable first, each with a row and a directory of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from agent.allocate.plain import PlainAllocation, PlainSettings
from agent.allocate.service import DISK_BUDGET
from agent.cluster import PodTable
from agent.errors import Refusal, RefusalReason, StateError
from agent.kit.cell import Cell
from agent.kit.timing import BEGUN, CLOSE, IdleWaiter
from agent.ledger import ContainerEdits, EditSettings, Holder, KubeletEpoch, Row, State
from agent.model import SliceId
from agent.reconcile import QUIET, Reconcile
from agent.state import StateService
from tests.builders import NOON, an_inventory
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.disk import GatedDisk
from tests.fakes.kubelet_side import RESOURCE, FakeHookDirs, FakeRecords, FakeWitness
from tests.services.at_work import at_work
from tests.unit.core.allocation.plain_scene import EPOCH, holds, ids


class PlainNode:
    """Plain mode on a node of fakes: a kubelet's books, ledger, virtual time."""

    def __init__(self) -> None:
        clock, epoch = LoopClock(NOON), Cell[KubeletEpoch | None](EPOCH)
        self.disk, self.hooks, self.calls = GatedDisk(), FakeHookDirs(), IdleWaiter()
        self.state = StateService(disk=self.disk, recovered=State(), boot_id="b")
        self.witness = FakeWitness()
        self.service = PlainAllocation(
            commit=self.state.commit,
            say=lambda _: None,
            inventory=Cell(an_inventory(count=2)),
            ledger=self.state.ledger,
            edits=Cell(EditSettings()),
            epoch=lambda: epoch.value,
            hooks=self.hooks,
            clock=clock,
            chance=Seeded(7),
            settings=PlainSettings(memory_limits=True),
        )
        self.reconcile = Reconcile(
            pods=Cell(PodTable(synced=True)),
            ledger=self.state.ledger,
            epoch=epoch,
            taken=self.service.taken,
            calls=self.calls,
            witness=self.witness,
            records=FakeRecords().read,
            hooks=self.hooks,
            clock=clock,
            resource=Cell(RESOURCE),
            adopt=None,
            commit=self.state.commit,
            say=lambda _: None,
        )

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.state.ledger.value.rows

    async def outcome(self, wanted: Sequence[SliceId]) -> ContainerEdits | Refusal:
        """What the kubelet is told when it asks for these."""
        try:
            return await self.service.allocate(tuple(wanted))
        except Refusal as refusal:
            return refusal

    async def outcomes(
        self, *wanted: Sequence[SliceId], apart: float = 2 * CLOSE
    ) -> list[ContainerEdits | Refusal]:
        """The same of calls that are under way at once, in the order in which they came."""
        self.disk.gate.clear()
        async with asyncio.TaskGroup() as group:
            calls = []
            for one in wanted:
                calls.append(group.create_task(self.outcome(one)))
                await asyncio.sleep(apart)
            self.disk.gate.set()
        return [call.result() for call in calls]


@contextlib.asynccontextmanager
async def a_node() -> AsyncIterator[PlainNode]:
    """A node whose ledger is being written and reconciled. A pod without a GPU is on every node."""
    node = PlainNode()
    node.witness.pods["kube-system", "proxy"] = holds(Holder("kube-system", "proxy", "main"))
    async with at_work(node.state.run, node.reconcile.run):
        yield node


def directory(edits: ContainerEdits | Refusal) -> str:
    """The directory of its own that an answer mounts."""
    assert isinstance(edits, ContainerEdits)
    (found,) = {one.host_path for one in edits.mounts if "/containers/" in one.host_path}
    return found.rpartition("/")[2]


async def test_of_calls_that_overlap_the_last_is_granted_and_in_the_end_all_whatever_their_ids():
    async with a_node() as node:
        given, waiting = [], 6
        while waiting:
            *earlier, last = await node.outcomes(*[ids(0)] * waiting)

            assert {RefusalReason.OVERLAP} >= {one.gate for one in earlier}
            assert all(one.transient for one in earlier)
            given.append(directory(last))
            waiting -= 1
            await asyncio.sleep(8)

        assert 6 == len(set(given))


async def test_of_calls_that_begin_in_one_moment_none_is_granted_and_one_when_it_is_repeated():
    """Which of them the kubelet began last cannot be known, and it crashes for the other."""
    async with a_node() as node:
        found = await node.outcomes(ids(0), ids(1), apart=CLOSE / 2)

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
        assert RefusalReason.OVERLAP is (await node.outcome(first)).gate
        assert directory(await node.service.allocate(second))
        assert directory(await node.service.allocate(first)), "the kubelet asks again"


async def test_of_preferences_asked_in_one_moment_no_request_is_granted_until_it_is_repeated():
    """The kubelet may have begun them in the other order."""
    async with a_node() as node:
        wanted = [await node.service.prefer(ids(0, 1, 2), (), 1) for _ in range(2)]

        assert {RefusalReason.OVERLAP} == {(await node.outcome(one)).gate for one in wanted}
        assert directory(await node.service.allocate(wanted[1]))


async def test_a_directory_that_cannot_be_made_refuses_and_its_row_closes_by_itself():
    async with a_node() as node:
        node.hooks.failure = StateError("vgpu is a link")

        refusal = await node.outcome(ids(0))
        node.hooks.failure = None

        assert RefusalReason.HOST_DIRECTORY is refusal.gate
        assert "vgpu is a link" in refusal.sentence
        await asyncio.sleep(130)
        assert () == node.rows


async def test_a_library_that_is_not_there_refuses_where_it_keeps_limits_alone():
    for limits in (True, False):
        async with a_node() as node:
            node.hooks.missing = ("libvgpu.so",)
            node.service.settings = PlainSettings(memory_limits=limits)
            outcome = await node.outcome(ids(0))
            assert limits is isinstance(outcome, Refusal)
            assert limits or () == outcome.mounts


async def test_no_list_is_asked_for_while_allocates_run_or_have_just_run():
    async with a_node() as node:
        await asyncio.sleep(5)
        before = node.witness.lists
        for number in range(20):
            wanted, holder = ids(number % 10, gpu=number // 10), Holder("a", f"p{number}", "c")
            with node.calls.busy():
                await node.service.allocate(wanted)
            node.witness.pods[holder.namespace, holder.pod] = holds(holder, *wanted)
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
