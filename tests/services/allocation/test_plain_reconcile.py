"""Plain mode and the kubelet agree: after bursts, at each kubelet, and when a pod ends."""

import asyncio
import contextlib
import errno

from agent.cluster import PodUid
from agent.ledger import PLAIN, Holder
from agent.reconcile.rules import PERIOD, QUIET
from tests.builders import NOON, a_row
from tests.services.allocation.plain_node import a_node
from tests.unit.core.allocation.plain_scene import EPOCH, HOLDER, NEXT, a_plain_row, ids

OTHER = Holder("team-b", "eval-0", "main")
HELD = a_plain_row(holder=HOLDER)
HELD_NAME = f"{HELD.key.pod_uid}_{PLAIN}"


@contextlib.contextmanager
def full(disk):
    """Every write fails while the block runs."""
    disk.faults.fail_at(0, errno.ENOSPC, times=10_000)
    yield
    disk.faults.revive()


async def serve(node, wanted, holder):
    """The kubelet asks, and books the answer."""
    with node.calls.busy():
        edits = await node.service.allocate(wanted)
    node.book(holder, wanted)
    return edits


async def test_the_kubelet_is_asked_at_the_start():
    async with a_node() as node:
        await asyncio.sleep(1)

        assert 1 == node.witness.lists


async def test_with_nothing_to_do_it_is_asked_once_a_minute():
    async with a_node() as node:
        await asyncio.sleep(10 * PERIOD + 5)

        assert 11 == node.witness.lists
        assert 0 == node.disk.writes


async def test_an_answer_is_confirmed_after_a_moment():
    async with a_node() as node:
        await asyncio.sleep(5)
        await serve(node, ids(0), HOLDER)
        await asyncio.sleep(1)

        assert HOLDER == node.rows[0].holder


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


async def test_a_call_that_is_held_holds_the_list_up():
    async with a_node() as node, asyncio.timeout(100):
        with node.calls.busy():
            await asyncio.sleep(90)
            assert 0 == node.witness.lists
        await asyncio.sleep(QUIET + 0.1)
        assert 1 == node.witness.lists


async def test_an_answer_that_is_booked_late_is_looked_for_again():
    async with a_node() as node:
        await node.service.allocate(ids(0))
        await asyncio.sleep(2)
        node.book(HOLDER, ids(0))
        await asyncio.sleep(2)

        assert HOLDER == node.rows[0].holder


async def test_a_row_that_is_being_closed_answers_nobody():
    row = a_plain_row(epoch=EPOCH)
    async with a_node(row) as node:
        node.epoch.set(NEXT)
        with full(node.disk):
            await asyncio.sleep(3 * PERIOD)  # its directory is gone, its row cannot go yet
        edits = await node.service.allocate(ids(0))

        assert edits != row.edits
        assert row.key not in {one.key for one in node.rows if one.answered_at > row.answered_at}


async def test_a_row_that_is_being_answered_with_is_not_closed():
    async with a_node(a_plain_row()) as node:
        await asyncio.sleep(PERIOD)
        node.epoch.set(NEXT)
        await asyncio.sleep(PERIOD - 1)
        node.disk.gate.clear()
        async with asyncio.TaskGroup() as group:
            call = group.create_task(node.service.allocate(ids(0)))
            await asyncio.sleep(0.5)
            node.disk.gate.set()

        assert {("replay", ""): 1} == node.results
        assert call.result() == node.rows[0].edits
        assert node.directories() <= node.hooks.names


async def test_a_container_that_nobody_here_answered_is_adopted_without_a_directory():
    async with a_node() as node:
        node.book(OTHER, ids(11, 4))
        await asyncio.sleep(2)
        (row,) = node.rows

        assert (OTHER, True, ids(11, 4)) == (row.holder, row.adopted, row.slice_ids)
        assert set() == node.hooks.names
        node.end(OTHER)
        await asyncio.sleep(PERIOD + 15)
        assert not node.rows


async def test_an_adoption_brings_no_look_of_its_own():
    async with a_node() as node:
        node.book(OTHER, ids(1))
        await asyncio.sleep(PERIOD / 2)

        assert 1 == node.witness.lists


async def test_without_a_kubelet_nobody_is_asked():
    async with a_node() as node:
        node.epoch.set(None)
        await asyncio.sleep(0)
        asked = node.witness.lists
        await asyncio.sleep(10 * PERIOD)

        assert node.witness.lists <= asked + 1


async def test_two_rows_of_one_name_are_no_trouble():
    twin = a_plain_row(uid=PodUid("b" * 32), holder=HOLDER)
    async with a_node(HELD, twin) as node:
        node.book(HOLDER, ids(0))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5 * PERIOD):
                await node.state.ledger.until(lambda ledger: len(ledger.rows) != 2)

        assert {HELD.key, twin.key} == {row.key for row in node.rows}


async def test_what_a_row_was_idle_under_one_kubelet_does_not_count_under_the_next():
    async with a_node(a_plain_row(slice_ids=ids(3))) as node:
        await asyncio.sleep(5)
        with node.calls.busy():
            await asyncio.sleep(58)
            node.epoch.set(NEXT)

        await asyncio.sleep(5)

        assert 1 == len(node.rows)


SCHEDULED = a_row(slice_ids=ids(0), epoch=EPOCH, pod="old", answered_at=NOON)
"""A row of hami mode in a state file of a version that took another `scheduler` at any time."""


async def test_a_row_of_hami_mode_answers_nobody_in_plain_mode():
    async with a_node(SCHEDULED) as node:
        node.epoch.set(NEXT)
        await asyncio.sleep(1)

        await serve(node, ids(0), HOLDER)

        assert [SCHEDULED.key] != [row.key for row in node.rows if row.holder == HOLDER]
        assert f"{SCHEDULED.key.pod_uid}_{SCHEDULED.key.container}" not in node.hooks.names


async def test_a_row_of_hami_mode_is_over_in_plain_mode_when_its_pod_is_gone():
    own = Holder(SCHEDULED.namespace, SCHEDULED.pod, SCHEDULED.key.container)
    async with a_node(SCHEDULED) as node:
        node.book(own, ids(0))
        await asyncio.sleep(2 * PERIOD)
        assert [own] == [row.holder for row in node.rows]
        node.witness.pods.pop((own.namespace, own.pod))
        node.holds.ids = []

        await asyncio.sleep(2 * PERIOD)

        assert [] == list(node.rows)
