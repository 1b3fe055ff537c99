"""The row of a deleted pod goes when its grace ends, and a hanging disk stops no look for ever."""

import asyncio
import datetime as dt

import msgspec
import pytest

from agent.cluster import Phase, PodTable, Tombstone
from agent.errors import KubeletError
from agent.ledger import container_directory
from agent.model import slice_id
from agent.reconcile.rules import PERIOD, QUIET, THROTTLED_PAUSE
from agent.state import COMMIT_DEADLINE
from tests.builders import G1, a_pod, a_pod_uid, a_row
from tests.services.reconcile.test_reconcile_rows import EPOCH, POD, ROW, SLICE, a_scene


def bury(scene):
    stone = Tombstone(POD, scene.clock.now())
    scene.pods.set(PodTable({}, (stone,), synced=True))


async def test_the_row_of_a_pod_deleted_between_two_looks_lives_a_minute_and_no_longer():
    async with a_scene(ROW) as scene:
        scene.see(POD)
        await asyncio.sleep(10)
        bury(scene)
        await asyncio.sleep(59.5)
        assert (ROW,) == scene.rows

        await asyncio.sleep(1)

        assert () == scene.rows
        assert 3 == scene.witness.lists


@pytest.mark.parametrize("hours", [-1, 1], ids=["back", "forward"])
@pytest.mark.parametrize("at", [0, 20])
async def test_a_clock_that_is_set_keeps_no_row_of_a_deleted_pod_for_long(hours, at):
    async with a_scene(ROW) as scene:
        scene.see(POD)
        await asyncio.sleep(10)
        bury(scene)
        await asyncio.sleep(at)
        scene.clock.step(dt.timedelta(hours=hours))

        await asyncio.sleep(2 * PERIOD)

        assert () == scene.rows


async def test_the_row_of_a_failed_pod_goes_after_a_clock_was_set_back():
    async with a_scene(ROW) as scene:
        scene.see(msgspec.structs.replace(POD, phase=Phase.FAILED))
        await asyncio.sleep(1)
        scene.clock.step(-dt.timedelta(hours=1))

        await asyncio.sleep(3 * PERIOD)

        assert () == scene.rows


async def test_an_answer_of_the_future_is_not_asked_for_each_second():
    row = msgspec.structs.replace(ROW, answered_at=ROW.answered_at + dt.timedelta(hours=1))
    async with a_scene(row) as scene:
        scene.see(POD)

        await asyncio.sleep(PERIOD / 2)

        assert [] == scene.witness.asked


async def test_a_grace_that_ended_without_the_kubelet_letting_go_is_left_to_the_next_look():
    async with a_scene(ROW) as scene:
        scene.witness.admit(POD)
        scene.see(POD)
        await asyncio.sleep(10)
        bury(scene)

        await asyncio.sleep(10 * PERIOD)

        assert 13 > scene.witness.lists
        assert [EPOCH] == [row.epoch for row in scene.rows]


async def test_a_kubelet_that_does_not_answer_when_the_grace_ends_is_not_asked_without_a_pause():
    async with a_scene(ROW) as scene:
        scene.see(POD)
        await asyncio.sleep(10)
        bury(scene)
        scene.witness.failures = [KubeletError("no socket")] * 3

        await asyncio.sleep(80)

        assert () == scene.rows
        assert 8 > scene.witness.lists


async def test_a_row_closed_by_a_write_that_was_given_up_loses_its_directory_all_the_same():
    async with a_scene(ROW) as scene:
        scene.hooks.names = {f"{POD.uid}_main"}
        scene.disk.gate.clear()
        scene.pods.set(PodTable(synced=True))
        await asyncio.sleep(PERIOD + COMMIT_DEADLINE + 0.5)
        assert (ROW,) == scene.rows
        scene.disk.gate.set()

        await asyncio.sleep(2 * PERIOD)

        assert () == scene.rows
        assert set() == scene.hooks.names


async def test_a_look_that_comes_too_soon_for_the_rate_limit_is_taken_a_moment_later():
    """Another client that asks in bursts would else meet each of our tries, a second apart."""
    async with a_scene(ROW) as scene:
        scene.witness.throttled = 3
        scene.witness.admit(POD, main=SLICE)
        scene.see(POD)

        await asyncio.sleep(QUIET + 4 * THROTTLED_PAUSE)

        assert [True] == [row.confirmed for row in scene.rows]


async def test_rows_that_a_late_commit_drops_are_in_nobodys_hands():
    async with a_scene(ROW) as scene:
        scene.disk.gate.clear()
        scene.see(msgspec.structs.replace(POD, phase=Phase.SUCCEEDED))
        await asyncio.sleep(COMMIT_DEADLINE + 0.3)
        scene.disk.gate.set()

        await asyncio.sleep(2 * PERIOD)

        assert ((), set()) == (scene.rows, scene.taken)


async def test_a_disk_that_hangs_at_many_directories_holds_up_no_confirmation():
    gone = [a_row(pod_uid=a_pod_uid(n), pod=f"gone-{n}", epoch=EPOCH) for n in range(10, 60)]
    async with a_scene(*gone) as scene:
        scene.hooks.hanging = "remove"
        scene.see(POD)
        await asyncio.sleep(PERIOD + 5)
        scene.witness.admit(POD, main=SLICE)
        await scene.answer()

        await asyncio.sleep(10)

        assert any(row.confirmed for row in scene.rows)


@pytest.mark.parametrize(
    ("phase", "within"), [(Phase.SUCCEEDED, PERIOD), (Phase.FAILED, 2 * PERIOD)]
)
@pytest.mark.parametrize("held", [{}, {"main": SLICE}], ids=["without ids", "with ids"])
async def test_a_kubelet_that_lists_pods_that_have_ended_keeps_nothing_of_them(phase, within, held):
    """Kubelets before 1.34 list a pod until its object is deleted, and have no Get."""
    stranger = a_pod(uid=a_pod_uid(5), name="other", phase=Phase.RUNNING)
    directory, free = container_directory(*msgspec.structs.astuple(ROW.key)), slice_id(G1, 4)
    async with a_scene(ROW) as scene:
        scene.hooks.names.add(directory)
        scene.witness.supported = False
        scene.witness.admit(POD, main=SLICE)
        scene.witness.admit(stranger, main=free)
        scene.see(POD, stranger)
        await asyncio.sleep(1)
        assert (1, [(free,)]) == (len(scene.rows), [row.slice_ids for row in scene.kept])

        scene.witness.admit(POD, **held)
        scene.see(*(msgspec.structs.replace(pod, phase=phase) for pod in (POD, stranger)))
        await asyncio.sleep(within + 2 * PERIOD)

        assert ((), ()) == (scene.rows, scene.kept)
        assert directory not in scene.hooks.names
        await asyncio.sleep(3 * PERIOD)
        assert ((), ()) == (scene.rows, scene.kept)
