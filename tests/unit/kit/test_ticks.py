"""What repeats wakes the process together; what waits for quiet gets it and holds nobody up."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.kit.timing import EARLY, TURN, Lull, until_tick

PERIODS = st.sampled_from([0.5, 2.5, 5.0, 10.0, 60.0])
ENOUGH = 1e-6
"""Seconds that floats of a long uptime may be off."""


class Standing(asyncio.SelectorEventLoop):
    """A loop whose clock stands at `now`."""

    now = 0.0

    def time(self) -> float:
        return self.now


def left(now: float, period: float, turn: int = 0) -> float:
    async def ask() -> float:
        return until_tick(period, turn)

    loop = Standing()
    loop.now = now
    try:
        return loop.run_until_complete(ask())
    finally:
        loop.close()


@given(st.floats(0, 1e7), PERIODS, st.integers(0, 4))
def test_the_next_tick_is_at_most_a_period_away_and_at_its_turn(now, period, turn):
    seconds = left(now, period, turn)
    ticks = (now + seconds - turn * TURN) / period

    assert 0 < seconds <= period + EARLY + ENOUGH
    assert abs(ticks - round(ticks)) < ENOUGH


def test_a_timer_that_fires_early_does_not_fire_twice():
    assert 5.0 + EARLY / 2 == pytest.approx(left(10.0 - EARLY / 2, 5.0))


async def test_what_has_periods_that_are_multiples_runs_in_the_same_turn_of_the_loop():
    loop, ran = asyncio.get_running_loop(), list[tuple[float, float]]()

    async def work(period: float, begun: float) -> None:
        await asyncio.sleep(begun)
        for _ in range(3):
            await asyncio.sleep(until_tick(period))
            ran.append((round(loop.time(), 6), period))

    async with asyncio.TaskGroup() as group:
        group.create_task(work(5.0, 0.3))
        group.create_task(work(10.0, 1.7))

    assert [(5, 5), (10, 5), (10, 10), (15, 5), (20, 10), (30, 10)] == sorted(ran)


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_where_nothing_ever_went_on_it_is_quiet_at_once():
    began = now()
    await Lull().come(100)

    assert began == now()


async def test_it_is_quiet_so_long_after_the_last_of_several_has_ended():
    lull, began = Lull(), now()

    async def work(seconds: float) -> None:
        with lull.busy():
            await asyncio.sleep(seconds)

    async with asyncio.TaskGroup() as group:
        for seconds in (3, 1, 2):
            group.create_task(work(seconds))
        await asyncio.sleep(0)
        await lull.come(0.5)

    assert 3.5 == now() - began


async def test_what_begins_meanwhile_starts_the_wait_anew():
    lull, began = Lull(), now()
    with lull.busy():
        pass
    async with asyncio.TaskGroup() as group:
        quiet = group.create_task(lull.come(1))
        await asyncio.sleep(0.9)
        with lull.busy():
            await asyncio.sleep(0.3)
        await quiet

    assert 2.2 == round(now() - began, 6)


async def test_work_that_fails_is_over_too():
    lull, began = Lull(), now()
    with contextlib.suppress(ValueError), lull.busy():
        int("no number")
    await lull.come(1)

    assert 1 == now() - began
