"""What is owed is done: once, locks first, and what can never be done is let go."""

import asyncio
import datetime as dt

import pytest

from agent.cluster import Phase
from agent.errors import ApiConflict, ApiInvalid
from tests.builders import NOON, a_pod
from tests.services.outbox.owing import GROUPS, a_placed_pod, owing, releasing, settling, telling

POD = a_placed_pod()
TO_ALLOCATE, PHASE = "hami.io/vgpu-devices-to-allocate", "hami.io/bind-phase"


async def test_a_pod_is_settled_with_one_patch_and_its_separators_stay():
    async with owing(POD) as desk:
        await desk.owe(settling(POD))
        await asyncio.sleep(1)

        assert ";;" == desk.annotations(POD)[TO_ALLOCATE]
        assert "success" == desk.annotations(POD)[PHASE]
        assert 1 == desk.api.writes
        assert () == desk.owed
        assert {("settle-pod", "done"): 1} == desk.results


async def test_the_lock_goes_before_everything_else():
    async with owing(POD) as desk:
        order = []
        for name in ("release_lock", "annotate_pod", "post_event"):
            _note(desk.api, name, order)

        await desk.owe(telling(POD), settling(POD), releasing(POD))
        await asyncio.sleep(1)

        assert ["release_lock", "annotate_pod", "post_event"] == order
        assert not desk.locked


def _note(api, name, order):
    call = getattr(api, name)

    async def noted(*args):
        order.append(name)
        return await call(*args)

    setattr(api, name, noted)


async def test_an_event_is_posted_on_the_pod():
    async with owing(POD) as desk:
        await desk.owe(telling(POD))
        await asyncio.sleep(1)

        (event,) = desk.api.events
        assert ("Refused", "no", True, POD.uid) == (
            event.reason,
            event.text,
            event.warning,
            event.pod_uid,
        )


async def test_a_pod_that_may_get_more_containers_is_settled_after_the_quiet_time():
    async with owing(POD) as desk:
        await desk.owe(settling(POD, phase="", groups=(0,), due=NOON + dt.timedelta(seconds=1)))
        await asyncio.sleep(0.9)
        assert 0 == desk.api.writes

        await asyncio.sleep(0.2)

        assert GROUPS.partition(";")[2] == desk.annotations(POD)[TO_ALLOCATE][1:]
        assert "allocating" == desk.annotations(POD)[PHASE]


async def test_two_containers_within_the_quiet_time_need_one_patch():
    async with owing(POD) as desk:
        await desk.owe(settling(POD, phase="", groups=(0,), due=NOON + dt.timedelta(seconds=1)))
        await asyncio.sleep(0.5)
        await desk.owe(settling(POD, due=desk.clock.now()))
        await asyncio.sleep(5)

        assert 1 == desk.api.writes
        assert ";;" == desk.annotations(POD)[TO_ALLOCATE]


async def test_a_clock_that_was_set_back_holds_nothing_up():
    async with owing(POD) as desk:
        await desk.owe(settling(POD, due=NOON + dt.timedelta(days=1)))
        await asyncio.sleep(1)

        assert () == desk.owed
        assert "success" == desk.annotations(POD)[PHASE]


async def test_what_the_pod_says_already_is_not_written_again():
    async with owing(POD) as desk:
        await desk.owe(settling(POD))
        await asyncio.sleep(1)
        desk.see()
        await desk.owe(settling(POD))
        await asyncio.sleep(1)

        assert 1 == desk.api.writes
        assert 1 == desk.results["settle-pod", "unchanged"]


async def test_a_pod_without_devices_text_gets_its_phase_only():
    bare = a_pod(annotations={PHASE: "allocating"})
    async with owing(bare) as desk:
        await desk.owe(settling(bare))
        await asyncio.sleep(1)

        assert {PHASE: "success"} == desk.annotations(bare)


async def test_a_success_for_a_terminal_pod_is_dropped_but_its_failure_is_written():
    failed = a_placed_pod(phase=Phase.FAILED)
    async with owing(failed) as desk:
        await desk.owe(settling(failed))
        await asyncio.sleep(1)
        assert "allocating" == desk.annotations(failed)[PHASE]
        assert {("settle-pod", "dropped"): 1} == desk.results

        await desk.owe(settling(failed, phase="failed", groups=()))
        await asyncio.sleep(1)

        assert "failed" == desk.annotations(failed)[PHASE]
        assert GROUPS == desk.annotations(failed)[TO_ALLOCATE]


async def test_a_pod_that_is_gone_is_let_go_without_asking():
    async with owing() as desk:
        await desk.owe(settling(POD))
        await asyncio.sleep(1)

        assert () == desk.owed
        assert 0 == desk.api.writes


@pytest.mark.parametrize("successor", [None, a_pod(uid="11111111-0000-4000-9000-000000000000")])
async def test_a_pod_that_went_unseen_or_has_a_successor_is_let_go(successor):
    async with owing(POD) as desk:
        desk.api.delete_pod(*POD.key)
        if successor is not None:
            desk.api.put_pod(a_pod(uid=successor.uid, name=POD.name))

        await desk.owe(settling(POD))
        await asyncio.sleep(1)

        assert () == desk.owed
        assert {("settle-pod", "dropped"): 1} == desk.results


async def test_a_successor_that_is_seen_already_is_never_settled_in_its_place():
    async with owing(POD) as desk:
        desk.api.delete_pod(*POD.key)
        desk.api.put_pod(a_pod(uid="11111111-0000-4000-9000-000000000000", name=POD.name))
        desk.see()

        await desk.owe(settling(POD))
        await asyncio.sleep(1)

        assert {("settle-pod", "dropped"): 1} == desk.results
        assert 0 == desk.api.writes


@pytest.mark.parametrize("held", [None, "2026-09-01T13:00:00Z,team-b,other"])
async def test_a_lock_that_is_absent_or_another_pods_is_done_and_stays(held):
    async with owing(POD) as desk:
        desk.api.edit_node({"hami.io/mutex.lock": held})

        await desk.owe(releasing(POD))
        await asyncio.sleep(1)

        assert () == desk.owed
        assert {("release-lock", "not-ours"): 1} == desk.results
        assert held == desk.api.node.annotations.get("hami.io/mutex.lock")


async def test_a_lock_of_a_node_that_is_gone_is_let_go():
    async with owing(POD) as desk:
        desk.api.delete_node()

        await desk.owe(releasing(POD))
        await asyncio.sleep(1)

        assert {("release-lock", "dropped"): 1} == desk.results


async def test_a_conflict_on_the_lock_is_tried_again():
    async with owing(POD) as desk:
        desk.api.fail(ApiConflict("try again", status=409))

        await desk.owe(releasing(POD))
        await asyncio.sleep(1)

        assert not desk.locked
        assert {("release-lock", "done"): 1, ("release-lock", "failed"): 1} == desk.results


async def test_a_conflict_on_a_pod_that_is_there_is_tried_again():
    """The API server gives a patch up after some collisions with other writers."""
    async with owing(POD) as desk:
        desk.api.fail(ApiConflict("the object has been modified", status=409))

        await desk.owe(settling(POD))
        await asyncio.sleep(5)

        assert {("settle-pod", "done"): 1, ("settle-pod", "failed"): 1} == desk.results


async def test_a_conflict_on_a_pod_that_is_gone_ends_it():
    async with owing() as desk:
        desk.api.fail(ApiConflict("the pod is another one", status=409))

        await desk.owe(settling(POD))
        await asyncio.sleep(60)

        assert {("settle-pod", "dropped"): 1} == desk.results
        assert () == desk.owed


async def test_a_patch_that_can_never_be_applied_is_let_go():
    async with owing(POD) as desk:
        desk.api.fail(ApiInvalid("annotations are too long", status=422))

        await desk.owe(settling(POD))
        await asyncio.sleep(60)

        assert {("settle-pod", "dropped"): 1} == desk.results
        assert () == desk.owed
