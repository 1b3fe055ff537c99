"""The ledger agrees with the kubelet: after an answer, at a new kubelet, each minute."""

import asyncio
import contextlib
import datetime as dt
import errno
from collections.abc import AsyncIterator

import msgspec
import pytest
from structlog.testing import capture_logs

from agent import hookdirs
from agent.cluster import NodeEvent, Phase, PodTable, Tombstone
from agent.errors import KubeletError, StateError
from agent.hookdirs import Cleared
from agent.kit.cell import Cell
from agent.kit.timing import IdleWaiter
from agent.ledger import ContainerKey, Decider, KubeletEpoch, Ledger, State, gaps
from agent.model import slice_id
from agent.reconcile import GRACE, PERIOD, QUIET, RETRY, THROTTLED_PAUSE, Reconcile
from agent.state import CURRENT, StateService
from tests.builders import G1, G2, NOON, a_pod, a_pod_uid, a_row
from tests.fakes.clock import LoopClock
from tests.fakes.disk import GatedDisk
from tests.fakes.kubelet_side import RESOURCE, FakeHookDirs, FakeRecords, FakeWitness
from tests.services.at_work import at_work

EPOCH, NEXT = KubeletEpoch(7, 1), KubeletEpoch(7, 2)
GROUPS = {"hami.io/vgpu-devices-allocated": f"{G1},NVIDIA,3000,30:;"}
POD = a_pod(annotations=GROUPS, phase=Phase.RUNNING)
SLICE = slice_id(G1, 0)
ROW = a_row(epoch=EPOCH, slice_ids=(SLICE,))


class RowsScene:
    """What a test of reconcile holds in its hands."""

    def __init__(self, *rows) -> None:
        self.disk = GatedDisk()
        self.clock = LoopClock(NOON)
        self.state = StateService(
            disk=self.disk, recovered=State(ledger=Ledger(tuple(rows))), boot_id="b"
        )
        self.pods: Cell[PodTable] = Cell(PodTable())
        self.epoch: Cell[KubeletEpoch | None] = Cell(EPOCH)
        self.witness = FakeWitness()
        self.records = FakeRecords()
        self.hooks = FakeHookDirs()
        self.taken: set[ContainerKey] = set()
        self.adoptable = True
        self.said: list[NodeEvent] = []
        self.reconcile = Reconcile(
            pods=self.pods,
            ledger=self.state.ledger,
            epoch=self.epoch,
            taken=self.taken,
            calls=IdleWaiter(),
            witness=self.witness,
            records=self.records.read,
            hooks=self.hooks,
            clock=self.clock,
            resource=Cell(RESOURCE),
            adopt=self._adopt,
            commit=self.state.commit,
            say=self.said.append,
        )

    async def _adopt(self, found):
        if not self.adoptable:
            return None
        row = a_row(pod_uid=found.pod.uid, pod=found.pod.name, slice_ids=found.ids)
        return msgspec.structs.replace(row, epoch=EPOCH, confirmed=True)

    def see(self, *pods, gone=()):
        graves = tuple(Tombstone(pod, self.clock.now()) for pod in gone)
        self.pods.set(PodTable({pod.uid: pod for pod in pods}, graves, synced=True))

    async def see_while_it_changes(self, row, *pods):
        """The pods are looked at while that row is on its way to disk."""
        self.disk.gate.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.state.commit(lambda ledger: ledger.put(row)))
            await asyncio.sleep(0.01)
            self.see(*pods)
            await asyncio.sleep(0.01)
            self.disk.gate.set()
        await asyncio.sleep(0.1)

    @property
    def rows(self):
        return self.state.ledger.value.rows_by(Decider.SCHEDULER)

    @property
    def kept(self):
        """Rows that only keep the ids of a stranger listed."""
        return self.state.ledger.value.rows_by(Decider.KUBELET)

    @property
    def gaps(self):
        return gaps(self.state.ledger.value, self.clock.now())

    async def answer(self, row=ROW):
        await self.state.commit(
            lambda ledger: ledger.put(msgspec.structs.replace(row, answered_at=self.clock.now()))
        )


@contextlib.asynccontextmanager
async def a_scene(*rows):
    scene = RowsScene(*rows)
    async with at_work(scene.state.run, scene.reconcile.run):
        await asyncio.sleep(0)
        yield scene


async def test_an_answer_that_the_kubelet_books_late_is_asked_for_again_but_not_for_ever():
    async with a_scene() as scene:
        scene.see(POD)
        await asyncio.sleep(1)
        scene.witness.admit(POD)
        await scene.answer()
        await asyncio.sleep(2.5)
        assert [False] == [row.confirmed for row in scene.rows]
        scene.witness.admit(POD, main=SLICE)
        await asyncio.sleep(1.5)
        assert [True] == [row.confirmed for row in scene.rows]

        await scene.answer(msgspec.structs.replace(ROW, confirmed=False))
        scene.witness.forget(POD)
        before = scene.witness.lists
        await asyncio.sleep(30)

        assert 5 >= scene.witness.lists - before


async def test_a_new_kubelet_is_looked_at_at_once_and_soon_again_until_it_knows_all():
    async with a_scene(msgspec.structs.replace(ROW, confirmed=True)) as scene:
        scene.see(POD)
        scene.witness.admit(POD, main=SLICE)
        await asyncio.sleep(5)
        assert 1 == scene.witness.lists

        scene.epoch.set(None)
        await asyncio.sleep(5)
        assert 1 == scene.witness.lists
        scene.epoch.set(NEXT)
        await asyncio.sleep(0.1)

        assert 2 == scene.witness.lists
        assert [(NEXT, True)] == [(row.epoch, row.confirmed) for row in scene.rows]
        scene.witness.forget(POD)
        scene.epoch.set(KubeletEpoch(7, 3))
        await asyncio.sleep(1)
        scene.witness.admit(POD, main=SLICE)
        await asyncio.sleep(3)
        assert [3] == [row.epoch.ctime_ns for row in scene.rows]


async def test_a_complete_look_is_taken_each_minute_and_writes_nothing_when_all_agrees():
    async with a_scene(msgspec.structs.replace(ROW, confirmed=True)) as scene:
        scene.see(POD)
        scene.witness.admit(POD, main=SLICE)

        await asyncio.sleep(10.5 * PERIOD)

        assert 11 == scene.witness.lists
        assert None is await scene.disk.read(CURRENT)


async def test_a_directory_that_cannot_be_removed_keeps_its_row_and_nothing_else():
    other = a_pod(uid=a_pod_uid(5), name="other", annotations=GROUPS, phase=Phase.RUNNING)
    held = a_row(pod_uid=other.uid, pod=other.name, epoch=EPOCH, slice_ids=(slice_id(G1, 5),))
    async with a_scene(ROW, held) as scene:
        scene.hooks.failure = StateError("read-only")
        scene.witness.admit(other, main=slice_id(G1, 5))
        scene.see(msgspec.structs.replace(POD, phase=Phase.SUCCEEDED), other)
        await asyncio.sleep(2.5 * PERIOD)
        assert [ROW.key, held.key] == [row.key for row in scene.rows]
        assert [False, True] == [row.confirmed for row in scene.rows]

        scene.hooks.failure = None
        await asyncio.sleep(PERIOD)

        assert [held.key] == [row.key for row in scene.rows]


async def test_a_row_that_is_being_answered_with_keeps_its_directory_and_stays():
    async with a_scene(ROW) as scene:
        scene.hooks.names = {f"{POD.uid}_main"}
        scene.taken.add(ROW.key)
        scene.see(msgspec.structs.replace(POD, phase=Phase.SUCCEEDED))
        await asyncio.sleep(2 * PERIOD)
        assert ({f"{POD.uid}_main"}, (ROW,)) == (scene.hooks.names, scene.rows)

        scene.taken.discard(ROW.key)
        await asyncio.sleep(PERIOD)

        assert (set(), ()) == (scene.hooks.names, scene.rows)
        assert set() == scene.taken


@pytest.mark.parametrize("after", [1.0, PERIOD / 2, PERIOD - 1.0])
async def test_the_row_of_a_deleted_pod_outlives_it_by_a_minute_whenever_it_was_deleted(after):
    async with a_scene(msgspec.structs.replace(ROW, confirmed=True)) as scene:
        scene.witness.admit(POD, main=SLICE)
        scene.see(POD)
        await asyncio.sleep(after)
        scene.witness.forget(POD)
        scene.see(gone=(POD,))

        await asyncio.sleep(59)
        assert [ROW.key] == [row.key for row in scene.rows]
        await asyncio.sleep(RETRY + 2)
        assert () == scene.rows


async def test_what_a_kubelet_said_before_the_next_one_came_confirms_nothing_of_that_one():
    async with a_scene(msgspec.structs.replace(ROW, epoch=EPOCH)) as scene:
        scene.witness.admit(POD, main=SLICE)
        scene.witness.delay = 0.5
        scene.see(POD)
        await asyncio.sleep(0.1)

        scene.epoch.set(NEXT)
        await asyncio.sleep(0.5)

        assert [(False, EPOCH)] == [(row.confirmed, row.epoch) for row in scene.rows]


OFFERED = msgspec.structs.replace(ROW, offered=True)
ELSEWHERE = slice_id(G2, 0)


def counted(scene):
    return sum(number for _, number in scene.reconcile.mismatches.items())


async def test_a_mismatch_is_counted_within_three_seconds_and_once_even_by_a_new_kubelet():
    async with a_scene() as scene:
        scene.see(POD)
        await asyncio.sleep(1)
        scene.witness.admit(POD, main=ELSEWHERE)

        await scene.answer(OFFERED)
        await asyncio.sleep(3)
        assert (1, 0) == (counted(scene), scene.gaps[0])
        scene.epoch.set(NEXT)
        await asyncio.sleep(3 * PERIOD)

        text = (
            f"Container main was given GPU {G1}, but the kubelet booked slices of {G2} for it; "
            "create the pod again. [HA-4006]"
        )
        where = POD.namespace, POD.name, POD.uid
        assert [NodeEvent("SliceMismatch", text, True, *where)] == scene.said
        assert 1 == counted(scene)
        assert [(NEXT, True)] == [(row.epoch, row.mismatched) for row in scene.rows]


@pytest.mark.parametrize(
    ("row", "held", "is_silent"),
    [
        (msgspec.structs.replace(ROW, epoch=NEXT), SLICE, False),
        (OFFERED, ELSEWHERE, False),
        (msgspec.structs.replace(ROW, answered_at=NOON - dt.timedelta(hours=1)), SLICE, True),
    ],
    ids=["a full disk", "a full disk, mismatched", "a silent kubelet"],
)
async def test_what_could_not_be_read_or_written_is_done_and_counted_at_the_next_look(
    row, held, is_silent
):
    async with a_scene(row) as scene:
        scene.witness.admit(POD, main=held)
        if is_silent:
            scene.witness.failures = [KubeletError("gone")]
        else:
            scene.disk.faults.fail_at(0, errno.ENOSPC, times=9)
        scene.see(POD)
        await asyncio.sleep(0.1)
        assert ([False], 0) == ([row.confirmed for row in scene.rows], counted(scene))
        scene.disk.faults.revive()

        await asyncio.sleep(RETRY + 1)

        assert [True] == [row.confirmed for row in scene.rows]
        assert (held == ELSEWHERE) == counted(scene)


@pytest.mark.parametrize(
    ("row", "held", "changes"),
    [
        (ROW, SLICE, {"slice_ids": (slice_id(G1, 8),), "epoch": NEXT}),
        (OFFERED, ELSEWHERE, {"slice_ids": (slice_id(ROW.shares[0].uuid, 3),)}),
    ],
    ids=["confirmed", "mismatched"],
)
async def test_a_row_that_was_answered_anew_while_it_was_looked_at_keeps_that(row, held, changes):
    replayed = msgspec.structs.replace(row, **changes)
    async with a_scene(row) as scene:
        scene.witness.admit(POD, main=held)
        await scene.see_while_it_changes(replayed, POD)

        assert ((replayed,), 0) == (scene.rows, counted(scene))


# Orphans go, and holders are taken over.

OWN = f"{POD.uid}_main"


async def test_a_container_without_row_and_record_is_known_by_its_directory_until_it_is_written():
    async with a_scene() as scene:
        scene.disk.faults.fail_at(0, errno.ENOSPC, times=9)
        scene.hooks.names = {OWN}
        scene.see(POD)
        await asyncio.sleep(0.1)
        assert () == scene.rows
        scene.disk.faults.revive()
        await asyncio.sleep(RETRY + 1)

        assert [(POD.uid, ())] == [(row.key.pod_uid, row.slice_ids) for row in scene.rows]
        assert not scene.hooks.made | scene.hooks.wiped


@pytest.mark.parametrize("is_made_by_a_call", [True, False])
async def test_a_pod_that_is_being_answered_is_not_known_by_its_directory(is_made_by_a_call):
    async with a_scene() as scene:
        scene.hooks.names = {OWN}
        scene.taken |= {ROW.key} if is_made_by_a_call else set()
        scene.see(POD)
        await asyncio.sleep(0.5)

        assert is_made_by_a_call == (scene.rows == ())


@pytest.mark.parametrize("groups", [None, POD.groups], ids=["bare", "unreadable"])
async def test_other_slices_of_a_stranger_that_is_asked_for_again_are_kept_in_place_of_the_old(
    groups,
):
    pod, other = msgspec.structs.replace(POD, groups=groups), slice_id(G1, 3)
    async with a_scene() as scene:
        scene.adoptable = False
        scene.witness.admit(pod, main=SLICE)
        scene.see(pod)
        await asyncio.sleep(0.1)
        scene.epoch.set(msgspec.structs.replace(EPOCH, ctime_ns=2))  # it lost its checkpoint
        scene.witness.admit(pod)
        await asyncio.sleep(2 * PERIOD)
        assert [(SLICE,)] == [row.slice_ids for row in scene.kept]

        scene.witness.admit(pod, main=other)
        await asyncio.sleep(PERIOD)
        assert {(SLICE,), (other,)} == {row.slice_ids for row in scene.kept}
        await asyncio.sleep(2 * PERIOD)

        assert [(other,)] == [row.slice_ids for row in scene.kept]


@pytest.mark.parametrize("hanging", ["found", "remove"])
async def test_a_disk_that_hangs_does_not_stop_the_looks(hanging):
    old = NOON - dt.timedelta(days=1)
    gone = [
        a_row(pod_uid=a_pod_uid(n), pod=f"gone-{n}", answered_at=old, confirmed=True)
        for n in range(10, 60)
    ]
    async with a_scene(*gone) as scene:
        scene.hooks.names = {OWN, *(row.directory for row in gone)}
        scene.hooks.hanging = hanging
        scene.see(POD)
        await asyncio.sleep(3.5 * PERIOD)
        assert 3 <= scene.witness.lists
        assert (hanging == "found") == (POD.uid not in {row.key.pod_uid for row in scene.rows})

        scene.hooks.hanging = ""
        await asyncio.sleep(2 * PERIOD)
        assert [POD.uid] == [row.key.pod_uid for row in scene.rows]
        assert {OWN} == scene.hooks.names


async def test_a_look_that_comes_too_soon_for_the_rate_limit_is_taken_a_moment_later():
    """Another client that asks in bursts would else meet each of our tries, a second apart."""
    async with a_scene(ROW) as scene:
        scene.witness.throttled = 3
        scene.witness.admit(POD, main=SLICE)
        scene.see(POD)

        await asyncio.sleep(QUIET + 4 * THROTTLED_PAUSE)

        assert [True] == [row.confirmed for row in scene.rows]


async def test_a_pod_deleted_before_the_kubelet_restarted_keeps_its_row_for_a_minute_after_that():
    """A kubelet that has just started knows no pod, and a deleted one may still run."""
    async with a_scene(ROW) as scene:
        scene.see(POD)
        await asyncio.sleep(10)
        scene.pods.set(PodTable({}, (Tombstone(POD, scene.clock.now()),), synced=True))
        await asyncio.sleep(PERIOD)
        scene.epoch.set(NEXT)

        await asyncio.sleep(GRACE - 1)
        assert (ROW,) == scene.rows
        await asyncio.sleep(PERIOD)
        assert () == scene.rows


# What containers left is removed pass by pass, and what stays is told once.

ONE = Cleared(kept=1, why="Permission denied")


@contextlib.asynccontextmanager
async def clearing(*passes: Cleared) -> AsyncIterator[tuple[FakeHookDirs, Cell[Cleared]]]:
    hooks, state = FakeHookDirs(), Cell(Cleared())
    hooks.cleared = list(passes)
    async with at_work(lambda: hookdirs.clear_directories(hooks, state)):
        await asyncio.sleep(1)
        yield hooks, state


async def test_it_clears_until_nothing_is_left_then_each_minute_and_at_once_what_is_set_aside():
    async with clearing(Cleared(more=True), Cleared(more=True), Cleared()) as (hooks, _):
        assert 3 == hooks.clears
        hooks.set_aside.set()
        await asyncio.sleep(1)
        assert 4 == hooks.clears
        await asyncio.sleep(60 * hookdirs.PERIOD)

        assert 64 == pytest.approx(hooks.clears, abs=1)


async def test_what_stays_is_told_once_until_nothing_does():
    three = Cleared(kept=3, why="Permission denied")
    with capture_logs() as logs:
        async with clearing(ONE, ONE, three, Cleared(), ONE) as (_, state):
            await asyncio.sleep(6 * hookdirs.PERIOD)

    assert ONE == state.value
    assert [("hooks.kept", 1, "Permission denied")] * 2 == [
        (line["event"], line["directories"], line["err"]) for line in logs
    ]


@pytest.mark.parametrize("failure", ["an error", "silence"])
async def test_a_disk_that_fails_forgets_nothing_and_is_asked_again(failure):
    async with clearing(ONE) as (hooks, state):
        hooks.hanging = "clear" if failure == "silence" else ""
        hooks.failure = None if hooks.hanging else StateError("read-only")
        await asyncio.sleep(hookdirs.PERIOD + hookdirs.DEADLINE)
        assert Cleared(kept=1) == state.value

        hooks.failure, hooks.hanging = None, ""
        await asyncio.sleep(2 * hookdirs.PERIOD)

        assert ONE == state.value
