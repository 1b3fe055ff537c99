"""A cell publishes state: each follower sees the newest value at its own pace."""

import asyncio

import pytest

from agent.kit.cell import Cell, News


async def collect(cell, into, pause=0.0):
    async for value in cell.follow():
        into.append(value)
        await asyncio.sleep(pause)


async def test_each_follower_has_its_own_pace_and_a_cancelled_one_leaves_the_others_alone():
    cell = Cell(0)
    quick: list[int] = []
    slow: list[int] = []
    async with asyncio.TaskGroup() as group:
        followers = [
            group.create_task(collect(cell, quick)),
            group.create_task(collect(cell, slow, pause=10.0)),
        ]
        leaver = group.create_task(collect(cell, []))
        for value, is_new in ((1, True), (2, True), (2, False), (3, True)):
            await asyncio.sleep(1)
            assert is_new is cell.set(value)
            leaver.cancel()
        await asyncio.sleep(20)
        for follower in followers:
            follower.cancel()

    assert ([0, 1, 2, 3], [0, 3]) == (quick, slow)


async def test_there_and_back_again_is_seen_as_a_change():
    cell = Cell("a")
    follower = cell.follow()
    await anext(follower)
    cell.set("b")
    cell.set("a")

    assert "a" == await anext(follower)


async def test_until_returns_the_first_value_that_fits_the_present_one_included():
    cell = Cell(0)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(cell.until(lambda value: value >= 2))
        for value in (1, 2, 3):
            await asyncio.sleep(1)
            cell.set(value)

    assert (2, 3) == (waiting.result(), await cell.until(lambda value: value == 3))


async def test_the_first_change_of_any_cell_is_news_and_nothing_within_the_time_is_none():
    first, second = Cell(1), Cell("a")
    loop = asyncio.get_running_loop()
    loop.call_later(3, second.set, "b")
    began, news = loop.time(), News(first, second)

    assert await news.wait(9)
    assert 3 == pytest.approx(loop.time() - began)
    assert not await news.wait(5)
    assert 8 == pytest.approx(loop.time() - began)


async def test_a_change_between_two_waits_is_not_missed():
    cell = Cell(1)
    cursor = News(cell)
    cell.set(2)
    assert await cursor.wait(5)

    cell.set(3)
    await asyncio.sleep(1)

    assert await cursor.wait(5)
    assert not await cursor.wait(5)


async def test_a_waiter_can_be_cancelled_and_leaves_nothing_behind():
    cell = Cell(1)
    before = asyncio.all_tasks()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(News(cell).wait())
        await asyncio.sleep(1)
        waiting.cancel()

    assert waiting.cancelled()
    assert before == asyncio.all_tasks()
