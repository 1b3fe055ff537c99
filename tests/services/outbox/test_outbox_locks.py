"""Locks that settlement finds: whose owner is over, gone, or still to be bound."""

import asyncio
import errno

import msgspec
import pytest

from agent.cluster import Phase, PodTable
from agent.errors import ApiConflict, ApiForbidden, ApiThrottled
from agent.settle import NOBODY, OUTLIVED
from tests.builders import a_pod_uid
from tests.services.outbox.owing import LOCK, a_placed_pod, owing, releasing, settling

POD = a_placed_pod()
UNSEEN = msgspec.structs.replace(releasing(POD), pod_uid=NOBODY)
"""The lock of an owner whom no view shows."""


def over(phase=Phase.FAILED):
    return a_placed_pod(phase=phase)


async def test_the_lock_of_a_pod_that_is_over_goes_behind_a_patch_with_its_uid():
    async with owing(over()) as desk:
        desk.found.set((settling(over(), phase="", groups=(), value=LOCK),))
        await asyncio.sleep(1)

        assert not desk.locked
        assert 2 == desk.api.writes
        assert {("settle-pod", "done"): 1} == desk.results


async def test_the_lock_stays_where_another_pod_has_the_name_by_now():
    async with owing(over()) as desk:
        desk.api.fail(ApiConflict("another UID", status=409), count=99, call="annotate_pod")
        desk.found.set((settling(over(), phase="", groups=(), value=LOCK),))
        await asyncio.sleep(30)

        assert desk.locked


async def test_what_was_found_is_done_once_while_the_views_are_late_and_again_when_it_comes_back():
    async with owing(over()) as desk:
        found = (settling(over(), phase="", groups=(), value=LOCK),)
        desk.found.set(found)
        await asyncio.sleep(30)
        assert 2 == desk.api.writes

        desk.found.set(())
        await asyncio.sleep(1)
        desk.api.edit_node({"hami.io/mutex.lock": LOCK})
        desk.found.set(found)
        await asyncio.sleep(1)

        assert not desk.locked


async def test_a_disk_that_is_full_keeps_no_lock():
    async with owing(over()) as desk:
        desk.disk.faults.fail_at(0, errno.ENOSPC, times=99)
        desk.found.set((settling(over(), phase="failed", groups=(), value=LOCK),))
        await asyncio.sleep(1)

        assert not desk.locked
        assert "failed" == desk.annotations(POD)["hami.io/bind-phase"]


async def test_the_lock_of_an_owner_that_is_not_here_goes_by_its_text():
    async with owing() as desk:
        desk.found.set((UNSEEN,))
        await asyncio.sleep(1)

        assert not desk.locked


async def test_the_lock_of_an_owner_whom_a_late_watch_hides_stays_until_it_is_gone():
    async with owing(POD) as desk:
        desk.pods.set(PodTable(synced=True))
        desk.found.set((UNSEEN,))
        await asyncio.sleep(30)
        assert desk.locked

        desk.api.fail(ApiThrottled("busy", status=429), count=2, call="get_pod")
        del desk.api.pods[POD.key]
        await asyncio.sleep(120)
        assert not desk.locked


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.SUCCEEDED])
async def test_the_lock_of_an_owner_that_is_over_goes_though_the_watch_is_late(phase):
    async with owing(over(phase)) as desk:
        desk.pods.set(PodTable(synced=True))
        desk.found.set((UNSEEN,))
        await asyncio.sleep(1)

        assert not desk.locked


async def test_the_lock_of_an_answered_pod_goes_where_nobody_has_its_name_and_outlives_nobody():
    async with owing() as desk:
        await desk.owe(settling(POD, value=LOCK))
        await asyncio.sleep(1)

        assert not desk.locked
        assert () == desk.owed
        assert {} == desk.outlived.value


@pytest.mark.parametrize(
    "error", [ApiConflict("other", status=409), ApiForbidden("no", status=403)]
)
async def test_the_lock_of_an_answered_pod_stays_where_another_one_may_have_taken_it_over(error):
    async with owing() as desk:
        desk.api.fail(error, call="annotate_pod")
        await desk.owe(settling(POD, value=LOCK))
        await asyncio.sleep(5)

        assert desk.locked
        assert () == desk.owed


async def test_a_lock_that_goes_while_its_pod_has_the_name_outlives_nobody():
    async with owing(POD) as desk:
        await desk.owe(settling(POD, value=LOCK))
        await asyncio.sleep(1)

        assert not desk.locked
        assert {} == desk.outlived.value


@pytest.mark.parametrize("again", [False, True])
async def test_a_lock_outlives_a_pod_that_is_gone_when_it_goes(monkeypatch, again):
    async with owing(POD) as desk:
        release = desk.api.release_lock

        async def delete_and_release(key, value):
            desk.api.delete_pod(*POD.key)
            if again:
                desk.api.put_pod(msgspec.structs.replace(POD, uid=a_pod_uid(77)))
            await release(key, value)

        monkeypatch.setattr(desk.api, "release_lock", delete_and_release)
        await desk.owe(settling(POD, value=LOCK))
        await asyncio.sleep(1)

        assert not desk.locked
        assert {LOCK: POD.uid} == desk.outlived.value


async def test_a_pod_that_the_node_may_not_read_is_gone_and_one_that_nobody_tells_of_is_not():
    for error, outlived in (
        (ApiForbidden("no", status=403), {LOCK: POD.uid}),
        (ApiThrottled("later", status=429), {}),
    ):
        async with owing(POD) as desk:
            desk.api.fail(error, call="get_pod")
            await desk.owe(settling(POD, value=LOCK))
            await asyncio.sleep(1)

            assert not desk.locked
            assert outlived == desk.outlived.value
            assert {("settle-pod", "done"): 1} == desk.results


async def test_no_more_locks_are_remembered_than_the_last():
    async with owing(POD) as desk:
        desk.api.fail(ApiForbidden("no", status=403), count=99, call="get_pod")
        for number in range(OUTLIVED + 1):
            desk.api.edit_node({"hami.io/mutex.lock": f"{LOCK}{number}"})
            await desk.owe(settling(POD, value=f"{LOCK}{number}"))
            await asyncio.sleep(1)

        assert OUTLIVED == len(desk.outlived.value)
        assert f"{LOCK}0" not in desk.outlived.value
