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
from agent.reconcile import PERIOD, Reconcile
from agent.state import StateService
from tests.builders import G1, G2, NOON, a_pod, a_pod_uid, a_row
from tests.fakes.clock import LoopClock
from tests.fakes.disk import GatedDisk
from tests.fakes.kubelet_side import RESOURCE, FakeHookDirs, FakeRecords, FakeWitness
from tests.services.at_work import at_work, scenarios

EPOCH, NEXT = KubeletEpoch(7, 1), KubeletEpoch(7, 2)
GROUPS = {"hami.io/vgpu-devices-allocated": f"{G1},NVIDIA,3000,30:;"}
POD = a_pod(annotations=GROUPS, phase=Phase.RUNNING)
SLICE = slice_id(G1, 0)
ROW = a_row(epoch=EPOCH, slice_ids=(SLICE,))
OTHER = a_pod(uid=a_pod_uid(5), name="other", annotations=GROUPS, phase=Phase.RUNNING)
OFFERED = msgspec.structs.replace(ROW, offered=True)
ELSEWHERE = slice_id(G2, 0)
OWN = f"{POD.uid}_main"
ROWS = {
    "new": [ROW],
    "booked": [msgspec.structs.replace(ROW, confirmed=True)],
    "offered": [OFFERED],
    "of-the-next": [msgspec.structs.replace(ROW, epoch=NEXT)],
    "old": [msgspec.structs.replace(ROW, answered_at=NOON - dt.timedelta(hours=1))],
    "two": [ROW, a_row(pod_uid=OTHER.uid, pod="other", epoch=EPOCH, slice_ids=(slice_id(G1, 5),))],
    "orphans": [
        a_row(
            pod_uid=a_pod_uid(n),
            pod=f"gone-{n}",
            answered_at=NOON - dt.timedelta(days=1),
            confirmed=True,
        )
        for n in range(10, 60)
    ],
}


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


async def do(scene: RowsScene, word: str) -> None:
    """`+5`: 5 s pass. `sees=ended,other`: what the API server shows; `sees=gone`: it was deleted.

    `holds=3`: the kubelet knows the pod, and slice 3 of GPU 1 for it; `2:0`: slice 0 of GPU 2.
    `answers`: the pod is answered now. `epoch=2`: the kubelet that is there.
    """
    verb, _, what = word.partition("=")
    pods = {"runs": POD, "ended": msgspec.structs.replace(POD, phase=Phase.SUCCEEDED)}
    if word.startswith("+"):
        await asyncio.sleep(float(word))
    elif verb == "sees":
        names = what.split(",")
        shown = {**pods, "other": OTHER}
        gone = [POD] * ("gone" in names)
        scene.see(*(shown[name] for name in names if name in shown), gone=gone)
    elif verb == "holds":
        gpu, _, number = what.rpartition(":")
        ids = {"main": slice_id(G2 if gpu == "2" else G1, int(number))} if what else {}
        scene.witness.admit(POD, **ids)
    elif verb == "other-holds":
        scene.witness.admit(OTHER, main=slice_id(G1, int(what)))
    elif verb == "forgets":
        scene.witness.forget(POD)
    elif verb == "answers":
        await scene.answer(OFFERED if what else ROW)
    elif verb == "epoch":
        scene.epoch.set(KubeletEpoch(7, int(what)) if what else None)
    elif verb == "directory":
        scene.hooks.names |= {OWN}
    elif verb == "taken":
        scene.taken ^= {ROW.key}
    elif verb == "full":
        scene.disk.faults.fail_at(0, errno.ENOSPC, times=9)
    elif verb == "free":
        scene.disk.faults.revive()
    elif verb == "hooks":
        scene.hooks.hanging = what if what in ("found", "remove") else ""
        scene.hooks.failure = StateError("read-only") if what == "fail" else None
    elif verb == "silent":
        scene.witness.failures = [KubeletError("gone")]
    else:
        setattr(scene.witness, verb, type(getattr(scene.witness, verb))(what))


def told(scene: RowsScene) -> str:
    """The rows, by which kubelet they are booked, and what else there is."""
    lines = []
    for row in scene.rows[:3]:
        ids = " ".join(
            f"{1 + (one.startswith(G2))}:{one.rpartition('-')[2]}" for one in row.slice_ids
        )
        marks = f"{' booked' * row.confirmed}{' mismatched' * row.mismatched}"
        lines.append(f"{row.pod} {ids or '-'} by {row.epoch.ctime_ns}{marks}")
    lines += [f"and {len(scene.rows) - 3} more"] * (len(scene.rows) > 3)
    names = ", ".join("own" if name == OWN else name[:8] for name in sorted(scene.hooks.names)[:2])
    lines.append(f"lists {scene.witness.lists}, writes {scene.disk.writes}")
    lines += [f"directories {names}"] * bool(names)
    counted = sum(number for _, number in scene.reconcile.mismatches.items())
    lines += [f"mismatches {counted}"] * bool(counted)
    lines += ["taken"] * bool(scene.taken)
    return " | ".join([*lines, *(event.reason for event in scene.said)])


SCENARIOS = scenarios("reconcile_scenarios.txt")


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_the_rows_and_what_the_kubelet_holds_come_to_agree_as_it_is_told(scenario):
    first, *words = scenario.split()
    rows = ROWS.get(first, [])
    async with a_scene(*rows) as scene:
        scene.hooks.names = {row.directory for row in rows if first == "orphans"}
        for word in words if rows else [first, *words]:
            await do(scene, word)
        assert SCENARIOS[scenario] == told(scene)


async def test_a_mismatch_is_told_with_both_gpus_and_what_to_do():
    async with a_scene() as scene:
        scene.see(POD)
        scene.witness.admit(POD, main=ELSEWHERE)
        await scene.answer(OFFERED)
        await asyncio.sleep(3)

        assert 0 == gaps(scene.state.ledger.value, scene.clock.now())[0]
        text = (
            f"Container main was given GPU {G1}, but the kubelet booked slices of {G2} for it; "
            "create the pod again. [HA-4006]"
        )
        where = POD.namespace, POD.name, POD.uid
        assert [NodeEvent("SliceMismatch", text, True, *where)] == scene.said


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

        assert ((replayed,), 0) == (scene.rows, len(scene.said))


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
