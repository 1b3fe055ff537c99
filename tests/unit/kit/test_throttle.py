"""The same thing is said once in a period, with how many were left out."""

import asyncio

from agent.kit.throttle import Throttle


async def test_one_is_let_through_in_a_period_and_the_next_one_counts_the_rest():
    throttle = Throttle(1.0)
    said = [throttle.admit() for _ in range(4)]
    await asyncio.sleep(1.0)

    assert [0, None, None, None] == said
    assert [3, None] == [throttle.admit(), throttle.admit()]
    await asyncio.sleep(5.0)
    assert 1 == throttle.admit()
