"""A heartbeat is as old as the loop has been stuck."""

import asyncio

from agent.kit.heartbeat import Heartbeat


async def test_before_the_first_beat_the_age_is_infinite():
    assert float("inf") == Heartbeat().age()


async def test_a_turning_loop_keeps_it_fresh_and_an_end_lets_it_age():
    heartbeat = Heartbeat(interval=2.0)
    async with asyncio.TaskGroup() as group:
        beating = group.create_task(heartbeat.run())
        await asyncio.sleep(101)
        assert 1.0 == heartbeat.age()
        beating.cancel()
        await asyncio.sleep(10)

    assert 11.0 == heartbeat.age()
