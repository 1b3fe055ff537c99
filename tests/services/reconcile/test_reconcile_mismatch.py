"""A mismatch is counted once, and in its row on disk; drift for as long as it lasts."""

import asyncio
import errno

import msgspec

from agent.model import slice_id
from agent.reconcile.rules import PERIOD
from tests.builders import G2
from tests.services.reconcile.test_reconcile_rows import NEXT, POD, ROW, SLICE, a_scene

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
        assert (1, 0) == (counted(scene), scene.reconcile.drifted.value)
        scene.epoch.set(NEXT)
        await asyncio.sleep(3 * PERIOD)

        assert 1 == counted(scene)
        assert [(NEXT, True)] == [(row.epoch, row.mismatched) for row in scene.rows]


async def test_a_mismatch_that_could_not_be_written_is_counted_at_the_next_look():
    async with a_scene(OFFERED) as scene:
        scene.witness.admit(POD, main=ELSEWHERE)
        scene.disk.faults.fail_at(0, errno.ENOSPC, times=9)
        scene.see(POD)
        await asyncio.sleep(0.1)
        assert 0 == counted(scene)
        scene.disk.faults.revive()

        await asyncio.sleep(PERIOD)

        assert 1 == counted(scene)


async def test_a_mismatched_row_that_was_answered_anew_meanwhile_is_not_told():
    replayed = msgspec.structs.replace(OFFERED, slice_ids=(slice_id(ROW.shares[0].uuid, 3),))
    async with a_scene(OFFERED) as scene:
        scene.witness.admit(POD, main=ELSEWHERE)
        await scene.see_while_it_changes(replayed, POD)

        assert ((replayed,), 0) == (scene.rows, counted(scene))


async def test_another_gpu_that_was_not_offered_is_drift_and_no_mismatch():
    async with a_scene(ROW) as scene:
        scene.witness.admit(POD, main=ELSEWHERE)
        scene.see(POD)
        await asyncio.sleep(2.5 * PERIOD)
        assert (1, 0) == (scene.reconcile.drifted.value, counted(scene))

        scene.witness.admit(POD, main=SLICE)
        await asyncio.sleep(PERIOD)

        assert 0 == scene.reconcile.drifted.value
