"""Plain mode and the kubelet agree: after bursts, at each kubelet, and when a pod ends."""

import asyncio
import contextlib
import errno

import pytest

from agent.cluster import PodUid
from agent.errors import KubeletError, StateError
from agent.ledger import PLAIN, Holder
from agent.reconcile.rules import DEADLINE, PERIOD, QUIET
from tests.builders import NOON, a_row
from tests.services.allocation.plain_node import a_node
from tests.unit.core.allocation.plain_scene import EPOCH, HOLDER, NEXT, a_plain_row, holds, ids

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


async def test_a_pod_that_ends_takes_its_row_and_its_directory_with_it():
    async with a_node() as node:
        await serve(node, ids(0), HOLDER)
        await asyncio.sleep(5)
        node.end(HOLDER)
        await asyncio.sleep(PERIOD + 15)

        assert not node.rows
        assert set() == node.hooks.names
        assert {} == node.state.ledger.value.held_ids()


async def test_a_directory_goes_before_its_row():
    async with a_node(HELD) as node:
        node.hooks.names.add(HELD_NAME)
        node.hooks.failure = StateError("the hook path is read-only")
        await asyncio.sleep(2 * PERIOD)
        assert (HELD.key,) == tuple(row.key for row in node.rows)

        node.hooks.failure = None
        await asyncio.sleep(2 * PERIOD)
        assert not node.rows
        assert set() == node.hooks.names


async def test_a_full_disk_puts_the_closing_off():
    async with a_node(HELD) as node:
        with full(node.disk):
            await asyncio.sleep(3 * PERIOD)
            assert 1 == len(node.rows)

        await asyncio.sleep(3 * PERIOD)
        assert not node.rows


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


async def test_a_new_kubelet_is_asked_at_once_and_closes_nothing_that_it_may_yet_learn_of():
    async with a_node() as node:
        await serve(node, ids(0), HOLDER)
        await asyncio.sleep(5)
        books, node.witness.pods = node.witness.pods, {}
        before = node.witness.lists
        node.epoch.set(NEXT)
        await asyncio.sleep(1)
        assert before + 1 == node.witness.lists

        await asyncio.sleep(20 * PERIOD)  # the API server is away: the kubelet knows no pods
        assert 1 == len(node.rows)

        node.witness.pods = books
        await asyncio.sleep(PERIOD)
        assert NEXT == node.rows[0].epoch


async def test_a_new_kubelet_that_learns_its_pods_late_confirms_them_soon():
    async with a_node() as node:
        await serve(node, ids(0), HOLDER)
        await asyncio.sleep(5)
        books, node.witness.pods = node.witness.pods, {}
        node.epoch.set(NEXT)
        await asyncio.sleep(2)
        node.witness.pods = books
        await asyncio.sleep(5)

        assert NEXT == node.rows[0].epoch


async def test_a_running_container_outlives_the_kubelets_checkpoint():
    async with a_node() as node:
        await serve(node, ids(0), HOLDER)
        await asyncio.sleep(5)
        node.lose_checkpoint(NEXT)
        node.holds.ids = []
        await asyncio.sleep(20 * PERIOD)

        assert node.directories() == node.hooks.names != set()

        node.end(HOLDER)
        await asyncio.sleep(3 * PERIOD)
        assert not node.rows


async def test_without_a_kubelet_nobody_is_asked():
    async with a_node() as node:
        node.epoch.set(None)
        await asyncio.sleep(0)
        asked = node.witness.lists
        await asyncio.sleep(10 * PERIOD)

        assert node.witness.lists <= asked + 1


async def test_a_kubelet_that_does_not_answer_is_asked_again_and_nothing_closes():
    async with a_node(HELD) as node:
        node.witness.failures += [KubeletError("no answer")] * 3
        await asyncio.sleep(3)
        assert 2 <= node.witness.lists
        node.witness.hung = True
        await asyncio.sleep(10 * (PERIOD + DEADLINE))
        assert 1 == len(node.rows)

        node.witness.hung = False
        await asyncio.sleep(2 * PERIOD)
        assert not node.rows


async def test_an_answer_of_a_kubelet_that_was_replaced_meanwhile_is_no_answer():
    async with a_node(HELD) as node:
        node.witness.delay = 1.0
        await asyncio.sleep(QUIET + 0.2)
        node.epoch.set(NEXT)
        await asyncio.sleep(0.5)
        assert EPOCH == node.rows[0].epoch


async def test_what_nobody_ever_booked_is_counted():
    async with a_node() as node:
        await node.service.allocate(ids(0))
        node.witness.pods[("a", "p")] = holds(Holder("a", "p", "c"), *ids(0, 1))
        await asyncio.sleep(3 * PERIOD)

        assert 1 == node.reconcile.unconfirmed.value


@pytest.mark.parametrize("count", [3])
async def test_a_kill_at_any_moment_leaves_no_directory_without_a_row(count):
    """Directories follow rows, and rows follow the kubelet: the next agent finds all of them."""
    async with a_node() as node:
        for number in range(count):
            await serve(node, ids(number), Holder("a", f"p{number}", "c"))
        assert node.hooks.names == node.directories()
        await asyncio.sleep(5)
        node.end(Holder("a", "p1", "c"))
        for _ in range(2 * int(PERIOD)):
            await asyncio.sleep(1)
            assert node.hooks.names <= node.directories()

        assert count - 1 == len(node.rows)


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
