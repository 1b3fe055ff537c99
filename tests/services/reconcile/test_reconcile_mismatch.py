"""A mismatch is told once, durably; drift is only counted, for as long as it lasts."""

import asyncio
import errno

import msgspec

from agent.ledger import EffectKind
from agent.model import slice_id
from agent.reconcile.rules import MISMATCH_EVENT, PERIOD
from agent.state import CURRENT, decode_state
from tests.builders import G2
from tests.services.reconcile.test_reconcile_rows import NEXT, POD, ROW, SLICE, a_scene

OFFERED = msgspec.structs.replace(ROW, offered=True)
ELSEWHERE = slice_id(G2, 0)


def events(scene):
    return [
        effect for effect in scene.state.ledger.value.outbox if effect.kind is EffectKind.POST_EVENT
    ]


def counted(scene):
    return sum(number for _, number in scene.reconcile.mismatches.items())


async def test_a_mismatch_is_an_event_on_the_pod_and_a_count_within_three_seconds():
    async with a_scene() as scene:
        scene.see(POD)
        await asyncio.sleep(1)
        scene.witness.admit(POD, main=ELSEWHERE)

        await scene.answer(OFFERED)
        await asyncio.sleep(3)

        (event,) = events(scene)
        assert (MISMATCH_EVENT, POD.uid, POD.name) == (event.reason, event.pod_uid, event.pod)
        assert (1, 0) == (counted(scene), scene.reconcile.drifted.value)


async def test_a_mismatch_that_lasts_is_told_once_even_after_it_was_posted_and_a_new_kubelet():
    async with a_scene(OFFERED) as scene:
        scene.witness.admit(POD, main=ELSEWHERE)
        scene.see(POD)
        await asyncio.sleep(0.1)
        (event,) = events(scene)
        await scene.state.commit(lambda ledger: ledger.done(event))
        scene.epoch.set(NEXT)

        await asyncio.sleep(3 * PERIOD)

        assert ([], 1) == (events(scene), counted(scene))
        assert [(NEXT, True)] == [(row.epoch, row.told) for row in scene.rows]


async def test_the_event_and_the_mark_are_on_disk_together():
    async with a_scene(OFFERED) as scene:
        scene.witness.admit(POD, main=ELSEWHERE)
        scene.see(POD)
        await asyncio.sleep(0.1)

        ledger = decode_state(await scene.disk.read(CURRENT)).ledger
        assert [(True, True)] == [(row.offered, row.told) for row in ledger.rows]
        assert [MISMATCH_EVENT] == [effect.reason for effect in ledger.outbox]


async def test_a_mismatch_that_could_not_be_written_is_told_at_the_next_look():
    async with a_scene(OFFERED) as scene:
        scene.witness.admit(POD, main=ELSEWHERE)
        scene.disk.faults.fail_at(0, errno.ENOSPC, times=9)
        scene.see(POD)
        await asyncio.sleep(0.1)
        assert ([], 0) == (events(scene), counted(scene))
        scene.disk.faults.revive()

        await asyncio.sleep(PERIOD)

        assert (1, 1) == (len(events(scene)), counted(scene))


async def test_a_mismatched_row_that_was_answered_anew_meanwhile_is_not_told():
    replayed = msgspec.structs.replace(OFFERED, slice_ids=(slice_id(ROW.shares[0].uuid, 3),))
    async with a_scene(OFFERED) as scene:
        scene.witness.admit(POD, main=ELSEWHERE)
        await scene.see_while_it_changes(replayed, POD)

        assert ((replayed,), [], 0) == (scene.rows, events(scene), counted(scene))


async def test_another_gpu_that_was_not_offered_is_drift_and_no_event():
    async with a_scene(ROW) as scene:
        scene.witness.admit(POD, main=ELSEWHERE)
        scene.see(POD)
        await asyncio.sleep(2.5 * PERIOD)
        assert (1, []) == (scene.reconcile.drifted.value, events(scene))

        scene.witness.admit(POD, main=SLICE)
        await asyncio.sleep(PERIOD)

        assert 0 == scene.reconcile.drifted.value
