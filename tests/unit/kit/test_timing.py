"""Shared ticks, deadlines by the time in which the loop ran, counts and the newest rows."""

import asyncio

import pytest

from agent.kit.timing import (
    EARLY,
    MOST,
    MOST_QUESTIONS,
    TICK,
    WINDOW,
    CallOrder,
    IdleWaiter,
    Lag,
    Starved,
    until_tick,
)
from tests.machine.sides import stall, starved, virtual


async def test_a_timer_that_fires_early_does_not_fire_twice(monkeypatch):
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 10.0 - EARLY / 2)
    assert 5.0 + EARLY / 2 == pytest.approx(until_tick(5.0, 0))


def now() -> float:
    return round(asyncio.get_running_loop().time(), 6)


async def test_it_is_quiet_so_long_after_the_last_of_several_has_ended():
    waiter, began = IdleWaiter(), now()

    async def work(seconds: float) -> None:
        with waiter.busy():
            await asyncio.sleep(seconds)

    async with asyncio.TaskGroup() as group:
        for seconds in (3, 1, 2):
            group.create_task(work(seconds))
        await asyncio.sleep(0)
        await waiter.idle_for(0.5)

    assert 3.5 == now() - began


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
    except TimeoutError as error:
        return loop.time() - began, isinstance(error, Starved)


BY_THE_CLOCK = (pytest.approx(SECONDS, abs=1e-5), False)


@virtual
async def test_while_the_loop_runs_it_is_a_deadline_by_the_clock_whatever_was_before():
    lag = Lag()
    assert BY_THE_CLOCK == await passed(lag)
    stall(50)
    assert BY_THE_CLOCK == await passed(lag)


@pytest.mark.parametrize("when", [0.0, 0.003, 0.25, 0.495, 0.4999])
@pytest.mark.parametrize("stalled", [0.03, 0.1, 0.3, 1.0, 5.0, 9.0])
@virtual
async def test_a_stall_at_any_time_extends_it_by_as_much(when, stalled):
    stall_after(when, stalled)
    took, is_starved = await passed(Lag())
    assert SECONDS + stalled - 2 * TICK <= took <= SECONDS + stalled + 2 * TICK
    assert is_starved == (stalled > SECONDS)


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
async def test_an_alarm_rings_once_and_only_during_its_block():
    rung = []
    with Lag().alarm(SECONDS, rung.append):
        await asyncio.sleep(0.4)
    await asyncio.sleep(5)
    assert [] == rung
    with Lag().alarm(SECONDS, rung.append):
        await asyncio.sleep(5)
    assert [False] == rung


# Which turn of a client may be granted: the last that it began with, and when nobody can tell.


@pytest.fixture
def order() -> CallOrder:
    return CallOrder(lambda: "client")


async def test_of_those_that_heard_the_same_none_is_the_last(order):
    for _ in range(2):
        order.begin().ids = frozenset("a")
    with order.asked(["a"]) as one, order.asked(["a"]) as other:
        assert one.overtaken
        assert other.overtaken
    with order.asked(["a"]) as later:
        assert not later.overtaken


async def test_questions_that_nobody_follows_up_are_forgotten(order):
    for number in range(2 * MOST_QUESTIONS):
        order.begin().ids = frozenset([str(number)])
    assert MOST_QUESTIONS == len(order.offered())


@virtual
async def test_after_a_stall_what_came_meanwhile_is_counted_before_the_quiet_ends():
    waiter, loop = IdleWaiter(), asyncio.get_running_loop()
    tasks = []

    async def read() -> None:
        for _ in range(5):  # a call passes through several callbacks
            await asyncio.sleep(0)
        with waiter.busy():
            await asyncio.sleep(0.2)

    def stop() -> None:
        stall(3.5)  # the call lies there
        tasks.append(loop.create_task(read()))

    with waiter.busy():
        pass
    loop.call_later(0.1, stop)
    await waiter.idle_for(0.5)

    assert [True] == [task.done() for task in tasks]


async def test_a_new_client_goes_on_with_nothing():
    client = "old"
    order = CallOrder(lambda: client)
    order.begin().ids = frozenset("a")
    client = "new"
    order.begin().ids = frozenset("a")
    with order.asked(["a"]) as turn:
        assert not turn.overtaken
