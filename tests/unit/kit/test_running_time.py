"""A deadline counts the time in which the loop ran, up to a limit, and says why it passed."""

import asyncio

import pytest

from agent.kit.timing import MOST, TICK, WINDOW, Budget, Lag, Starved
from tests.machine.virtual import stall, starved, virtual

SECONDS = 0.5


def stall_after(when, seconds):
    asyncio.get_running_loop().call_later(when, stall, seconds)


async def passed(lag, seconds=SECONDS):
    """The seconds until such a deadline passes, and whether for want of the processor."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        async with lag.within(seconds):
            await asyncio.Event().wait()
    except Starved:
        return loop.time() - began, True
    except TimeoutError:
        return loop.time() - began, False


@virtual
async def test_while_the_loop_runs_it_is_a_deadline_by_the_clock():
    assert (pytest.approx(SECONDS, abs=1e-5), False) == await passed(Lag())


@pytest.mark.parametrize("when", [0.0, 0.003, 0.25, 0.495, 0.4999])
@pytest.mark.parametrize("stalled", [0.03, 0.1, 0.3, 1.0, 5.0, 9.0])
@virtual
async def test_a_stall_at_any_time_extends_it_by_as_much(when, stalled):
    stall_after(when, stalled)
    took, is_starved = await passed(Lag())

    assert SECONDS + stalled - 2 * TICK <= took <= SECONDS + stalled + 2 * TICK
    assert is_starved == (stalled > SECONDS)


@pytest.mark.parametrize("share", [0.2, 0.1, 0.05])
@virtual
async def test_under_a_quota_it_counts_about_what_the_loop_ran(share):
    async with starved(share):
        took, is_starved = await passed(Lag())

    assert 0.5 * SECONDS / share <= took <= SECONDS / share + 0.2
    assert is_starved


@virtual
async def test_lag_extends_deadlines_by_the_limit_in_any_window():
    lag, loop = Lag(), asyncio.get_running_loop()
    async with starved(0.001):
        ends = [(loop.time(), *await passed(lag)) for _ in range(200)]

    for begun, _, _ in ends:
        inside = [took for at, took, _ in ends if begun <= at and at + took < begun + WINDOW]
        assert sum(inside) <= MOST + len(inside) * (SECONDS + 0.2)
    assert sum(took for _, took, _ in ends) > 1.1 * len(ends) * SECONDS
    assert all(is_starved for _, _, is_starved in ends)


@pytest.mark.parametrize("when", [0.0, 0.48, 0.4999])
@virtual
async def test_what_came_during_the_stall_is_read_before_the_deadline_passes(when):
    loop, answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    async def read():
        for _ in range(5):  # a message passes through several callbacks
            await asyncio.sleep(0)
        answer.set_result("here")

    def come():
        stall(3.0)
        loop.create_task(read())

    loop.call_later(when, come)
    async with Lag().within(SECONDS):
        assert "here" == await answer


@virtual
async def test_deadlines_of_one_node_share_the_limit_and_count_a_stall_once():
    lag = Lag()
    for _ in range(2):
        stall_after(0.1, 4.0)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(passed(lag)) for _ in range(3)]
        assert all(task.result()[0] >= 4.4 for task in tasks)
    stall_after(0.1, 4.0)
    assert 4.2 > (await passed(lag))[0]


@virtual
async def test_lag_between_deadlines_counts_for_none():
    lag = Lag()
    await passed(lag)
    stall(50)

    assert (pytest.approx(SECONDS, abs=1e-5), False) == await passed(lag)


@virtual
async def test_a_budget_is_spent_by_the_time_that_the_loop_ran():
    budget = Budget(Lag(), SECONDS)
    stall_after(0.1, 2.0)
    async with budget.within():
        await asyncio.sleep(0.2)
    began = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        async with budget.within(budget.left - 0.1):
            await asyncio.Event().wait()
    rest = asyncio.get_running_loop().time() - began
    with pytest.raises(TimeoutError):
        async with budget.within(0.05):
            await asyncio.Event().wait()

    assert 0.2 <= rest <= 0.4


@virtual
async def test_an_alarm_rings_once_and_only_during_its_block():
    rung = []
    with Lag().alarm(SECONDS, rung.append):
        await asyncio.sleep(0.4)
    await asyncio.sleep(5)
    assert [] == rung
    with Lag().alarm(SECONDS, rung.append):
        await asyncio.sleep(5)
    assert [False] == rung


@virtual
async def test_an_error_of_the_block_and_a_cancellation_pass():
    with pytest.raises(KeyError):
        async with Lag().within(SECONDS):
            raise KeyError
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), Lag().within(SECONDS):
            await asyncio.Event().wait()
