"""A figure of XIDs is of an agent at rest: no strike falls into the wait after the list before."""

import asyncio

import pytest

from agent.health.xids import HealthSettings
from tests.bench.strikes import REST, at_rest


def test_an_agent_at_rest_holds_nothing_back_any_more():
    assert REST > 5 * HealthSettings().coalesce


async def test_rest_is_the_time_after_the_last_list():
    lists, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    begun = loop.time()
    for number in range(1, 4):
        loop.call_later(0.2 * number, lists.feed_data, f"{number}.5 100\n".encode())

    assert [1.5, 2.5, 3.5] == await at_rest(lists)
    assert pytest.approx(0.6 + REST) == loop.time() - begun


async def test_a_reader_that_has_ended_is_no_rest():
    lists = asyncio.StreamReader()
    lists.feed_eof()
    with pytest.raises(RuntimeError, match="has ended"):
        await at_rest(lists)
