"""What the outside world does not say in time, or cannot take, becomes a refusal."""

import asyncio
import errno

import msgspec
import pytest

from agent.allocate.service import (
    API_BUDGET,
    KUBELET_BUDGET,
    LIST_PAUSE,
    LOCK_PAUSE,
    OWNER_BUDGET,
    USED_LOCKS,
    WAIT_BURST,
    WAIT_REFILL,
)
from agent.cluster import NodeView, Phase, PodTable
from agent.errors import KubeletError, Refusal, RefusalReason
from agent.kit.timing import MOST, WINDOW
from agent.reconcile import THROTTLED_PAUSE
from agent.witness import CALL_DEADLINE
from tests.builders import NODE, a_lock
from tests.machine.sides import starved, virtual
from tests.services.allocation.allocating import G2, a_desk, ids, placed


async def refused(desk, gate, count=1):
    with pytest.raises(Refusal) as caught:
        await desk.service.allocate(ids(*range(count)))
    assert gate is caught.value.gate
    assert {("refused", gate.name.lower()): 1} == {
        key: count for key, count in desk.results.items() if key[0] == "refused"
    }
    return caught.value


def elapsed():
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("trouble", "asked", "took"),
    [
        *(({"delay": seconds}, 1, seconds) for seconds in (0.9, 1.5, 4.0)),
        ({"throttled": 3}, 4, 3 * THROTTLED_PAUSE),
        ({"failures": [KubeletError("connection lost")]}, 2, None),
    ],
    ids=["slow", "slower", "slowest", "over its rate limit", "one lost connection"],
)
async def test_a_kubelet_that_answers_late_or_at_the_next_try_costs_no_pod(trouble, asked, took):
    """The client gives a slow answer up no sooner than the budget ends."""
    async with a_desk() as desk:
        desk.bind(placed(1))
        vars(desk.witness).update(trouble)
        began = elapsed()

        await desk.service.allocate(ids(1))

        assert KUBELET_BUDGET <= CALL_DEADLINE
        assert asked == len(desk.witness.asked)
        assert took is None or took == pytest.approx(elapsed() - began)
        assert 1 == len(desk.ledger.rows)


async def test_a_pod_is_refused_after_its_lock_had_a_moment_to_come():
    async with a_desk() as desk:
        desk.admit(placed(1, annotations={}))
        began = elapsed()
        await refused(desk, RefusalReason.NO_LOCK)

        assert LOCK_PAUSE == pytest.approx(elapsed() - began)


async def test_a_kubelet_without_get_serves_the_lock_owner_alone():
    async with a_desk() as desk:
        desk.witness.supported = False
        desk.bind(placed(1))
        await asyncio.sleep(1)
        desk.records.reads = 0

        await desk.service.allocate(ids(1))

        assert 1 == len(desk.ledger.rows)
        assert 1 == desk.records.reads
        assert 1 == desk.owners_refreshes == desk.refreshes


@pytest.mark.parametrize(
    ("synced", "stale", "held"),
    [(False, False, API_BUDGET), (True, True, API_BUDGET), (True, False, OWNER_BUDGET)],
    ids=["it never answered", "its watch is down", "its watch is open"],
)
async def test_an_api_server_that_hangs_is_waited_for_as_long_as_it_may_still_tell(
    synced, stale, held
):
    async with a_desk() as desk:
        desk.pods.set(PodTable(synced=synced, stale=stale))
        desk.silent = asyncio.Event()
        began = elapsed()

        await refused(desk, RefusalReason.PODS_UNKNOWN)

        assert held == pytest.approx(elapsed() - began)


async def test_an_api_server_that_hangs_holds_the_kubelet_for_few_pods_that_nobody_knows():
    async with a_desk() as desk:
        desk.silent = asyncio.Event()
        began = elapsed()
        for _ in range(100):
            with pytest.raises(Refusal):
                await desk.service.allocate(ids(0))

        waits = WAIT_BURST + (elapsed() - began) / WAIT_REFILL
        assert 100 * LIST_PAUSE + waits * OWNER_BUDGET >= elapsed() - began


async def test_a_lock_that_another_pod_used_up_is_no_right_where_the_node_cannot_be_read():
    async with a_desk() as desk:
        first = placed(1, reusable_name=False)
        desk.bind(first)
        await desk.service.allocate(ids(0))
        desk.bury(first)
        desk.witness.forget(first)
        text = f"{G2},NVIDIA,80000,100:;"
        forged = placed(1, text, uid=placed(9).uid, reusable_name=False)
        desk.admit(forged)
        desk.silent = asyncio.Event()

        await refused(desk, RefusalReason.PODS_UNKNOWN)


async def test_of_the_locks_that_pods_were_answered_under_the_newest_are_remembered():
    async with a_desk() as desk:
        desk.service.used_locks = {f"lock {n}": placed(n).uid for n in range(USED_LOCKS)}
        desk.bind(placed(1))
        await desk.service.allocate(ids(0))

        assert USED_LOCKS == len(desk.service.used_locks)
        assert desk.ledger.rows[0].lock in desk.service.used_locks


async def waste(desk, number):
    """A pod that nobody placed is refused; the seconds that the kubelet was held for it."""
    stray = placed(number, annotations={})
    desk.admit(stray)
    began = elapsed()
    await desk.service.prefer(ids(0, 1), (), 1)
    with pytest.raises(Refusal):
        await desk.service.allocate(ids(0))
    desk.see(msgspec.structs.replace(stray, phase=Phase.FAILED))
    desk.witness.forget(stray)
    return elapsed() - began


async def test_however_many_stray_pods_come_they_hold_the_kubelet_for_a_moment_only():
    async with a_desk() as desk:
        held = [await waste(desk, number) for number in range(100, 200)]

        assert WAIT_BURST * LOCK_PAUSE >= sum(held)
        assert 0 == pytest.approx(sum(held[WAIT_BURST:]))
        await asyncio.sleep(WAIT_REFILL)
        assert 0 < await waste(desk, 200)


@virtual
async def test_stray_pods_are_waited_for_no_longer_where_the_agent_gets_little_cpu():
    async with a_desk() as desk, starved(0.1):
        began = elapsed()
        for number in range(100, 200):
            await waste(desk, number)
        took = elapsed() - began

    waits = WAIT_BURST + took / WAIT_REFILL
    assert waits * LOCK_PAUSE + MOST * (1 + took / WINDOW) >= took


async def test_among_stray_pods_a_lock_that_the_watch_shows_late_is_read_at_once():
    async with a_desk() as desk:
        for number in range(100, 120):
            await waste(desk, number)
        pod = placed(1)
        desk.admit(pod)
        text = a_lock(namespace=pod.namespace, name=pod.name).value
        desk.unseen_node = NodeView(NODE, "uid", "2", {"hami.io/mutex.lock": text})
        began = elapsed()

        await desk.service.allocate(ids(0))

        assert 0 == pytest.approx(elapsed() - began)
        assert [pod.uid] == [row.key.pod_uid for row in desk.ledger.rows]


async def test_a_pod_that_ran_is_served_though_it_was_refused_while_the_view_was_late():
    async with a_desk() as desk:
        pod = placed(1)
        desk.bind(pod)
        desk.disk.faults.fail_at(0, errno.ENOSPC, times=50)
        await refused(desk, RefusalReason.STATE_UNWRITABLE)
        assert {pod.uid} == desk.service.rejected.keys()
        desk.disk.faults.revive()

        ran = [msgspec.structs.replace(one, has_run=True) for one in pod.containers]
        desk.bind(msgspec.structs.replace(pod, containers=tuple(ran)))

        await desk.service.allocate(ids(1))

        assert [pod.uid] == [row.key.pod_uid for row in desk.ledger.rows]


# A call that ran out of time says what it was about, and of which pod, where that is known.
