"""A start after a day away: orphans go, holders are taken over."""

import asyncio
import datetime as dt
import errno

import msgspec
import pytest

from agent.cluster import Phase, PodTable, Tombstone
from agent.ledger import KubeletEpoch
from agent.model import slice_id
from agent.reconcile import GRACE, PERIOD, QUIET, RETRY, THROTTLED_PAUSE
from tests.builders import G1, NOON, a_pod, a_pod_uid, a_row
from tests.services.reconcile.test_reconcile_rows import (
    EPOCH,
    GROUPS,
    NEXT,
    POD,
    ROW,
    SLICE,
    a_scene,
)

DAY = dt.timedelta(days=1)
OLD = msgspec.structs.replace(
    ROW, answered_at=NOON - DAY, confirmed=True, epoch=KubeletEpoch(inode=7, ctime_ns=0)
)
OWN = f"{POD.uid}_main"


async def test_a_pod_that_came_meanwhile_is_taken_over_and_its_directory_left_as_it_is():
    came = a_pod(uid=a_pod_uid(6), name="came", annotations=GROUPS, phase=Phase.RUNNING)
    async with a_scene(OLD) as scene:
        scene.witness.admit(POD, main=SLICE)
        scene.witness.admit(came, main=f"{SLICE.rpartition('-')[0]}-4")
        scene.see(POD, came)
        await asyncio.sleep(0.1)

        assert [POD.uid, came.uid] == [row.key.pod_uid for row in scene.rows]
        assert () == scene.kept
        assert not scene.hooks.made
        assert not scene.hooks.wiped


async def test_a_container_whose_row_and_record_are_both_lost_is_known_by_its_directory():
    async with a_scene() as scene:
        scene.hooks.names = {OWN}
        scene.witness.admit(POD)
        scene.see(POD)
        await asyncio.sleep(0.1)

        assert [(POD.uid, ())] == [(row.key.pod_uid, row.slice_ids) for row in scene.rows]


async def test_what_its_directory_alone_shows_is_looked_for_until_its_row_is_on_disk():
    async with a_scene() as scene:
        scene.disk.faults.fail_at(0, errno.ENOSPC, times=9)
        scene.hooks.names = {OWN}
        scene.see(POD)
        await asyncio.sleep(0.1)
        assert () == scene.rows
        scene.disk.faults.revive()
        await asyncio.sleep(RETRY + 1)

        assert [POD.uid] == [row.key.pod_uid for row in scene.rows]


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
    gone = a_row(pod_uid=a_pod_uid(5), pod="gone", answered_at=NOON - DAY, confirmed=True)
    async with a_scene(gone) as scene:
        scene.hooks.names = {OWN, f"{a_pod_uid(5)}_main"}
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


# The row of a deleted pod goes when its grace ends, and a hanging disk stops no look for ever.


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
