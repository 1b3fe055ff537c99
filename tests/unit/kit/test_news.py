"""Waiting for whichever of several cells changes first, without missing one."""

import asyncio

import pytest

from agent.kit.cell import Cell
from agent.kit.news import News, news


async def test_the_first_change_of_any_cell_is_news():
    first, second = Cell(1), Cell("a")
    asyncio.get_running_loop().call_later(3, second.set, "b")

    assert await news(first, second)


async def test_nothing_within_the_time_is_no_news():
    began = asyncio.get_running_loop().time()

    assert not await news(Cell(1), within=5)

    assert 5 == pytest.approx(asyncio.get_running_loop().time() - began)


async def test_a_change_between_two_waits_is_not_missed():
    cell = Cell(1)
    cursor = News(cell)
    cell.set(2)
    assert await cursor.wait(5)

    cell.set(3)
    await asyncio.sleep(1)

    assert await cursor.wait(5)
    assert not await cursor.wait(5)


async def test_a_cell_that_closes_brings_no_news_and_the_others_still_do():
    closed, other = Cell(1), Cell(1)
    asyncio.get_running_loop().call_later(1, closed.close)
    asyncio.get_running_loop().call_later(2, other.set, 2)
    began = asyncio.get_running_loop().time()

    assert await news(closed, other, within=9)

    assert 2 == pytest.approx(asyncio.get_running_loop().time() - began)


async def test_a_waiter_can_be_cancelled_and_leaves_nothing_behind():
    cell = Cell(1)
    before = asyncio.all_tasks()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(news(cell))
        await asyncio.sleep(1)
        waiting.cancel()

    assert waiting.cancelled()
    assert before == asyncio.all_tasks()
