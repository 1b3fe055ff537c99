"""A cell publishes state: each follower sees the newest value at its own pace, and then the end."""

import asyncio

import pytest

from agent.kit.cell import Cell, CellClosed, News


async def collect(cell, into, pause=0.0):
    async for value in cell.follow():
        into.append(value)
        await asyncio.sleep(pause)


async def test_each_follower_has_its_own_pace_and_a_cancelled_one_leaves_the_others_alone():
    cell = Cell(0)
    quick: list[int] = []
    slow: list[int] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(collect(cell, quick))
        group.create_task(collect(cell, slow, pause=10.0))
        leaver = group.create_task(collect(cell, []))
        for value, is_new in ((1, True), (2, True), (2, False), (3, True)):
            await asyncio.sleep(1)
            assert is_new is cell.set(value)
            leaver.cancel()
        await asyncio.sleep(20)
        cell.close()

    assert ([0, 1, 2, 3], [0, 3]) == (quick, slow)


async def test_there_and_back_again_is_seen_as_a_change():
    cell = Cell("a")
    follower = cell.follow()
    await anext(follower)
    cell.set("b")
    cell.set("a")

    assert "a" == await anext(follower)


async def test_a_branch_takes_each_value_at_once_until_it_is_closed():
    cell = Cell(1)
    branch, other = cell.branch(), cell.branch()
    assert (1, 1) == (branch.value, other.value)

    cell.set(2)
    assert (2, 2) == (branch.value, other.value)

    branch.close()
    cell.set(3)
    assert (2, 3) == (branch.value, other.value)
    assert not cell.closed


async def test_followers_of_a_branch_are_woken_ahead_of_the_cells_own():
    cell = Cell(0)
    branch = cell.branch()
    woken: list[str] = []

    async def follow(followed, name):
        await followed.until(lambda value: value == 1)
        woken.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(follow(cell, "cell"))
        group.create_task(follow(branch, "branch"))
        await asyncio.sleep(1)
        cell.set(1)

    assert ["branch", "cell"] == woken


async def test_closing_ends_followers_after_the_newest_value_and_later_ones_are_kept_alone():
    cell = Cell(0)
    follower = cell.follow()
    await anext(follower)
    cell.set(1)
    cell.close()
    cell.close()

    assert [1] == [value async for value in follower]
    assert [1] == [value async for value in cell.follow()]
    assert cell.set(6)
    assert (6, True) == (cell.value, cell.closed)
    assert [] == [value async for value in follower]


async def test_until_returns_the_first_value_that_fits_the_present_one_included():
    cell = Cell(0)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(cell.until(lambda value: value >= 2))
        for value in (1, 2, 3):
            await asyncio.sleep(1)
            cell.set(value)

    assert (2, 3) == (waiting.result(), await cell.until(lambda value: value == 3))
    cell.close()
    with pytest.raises(CellClosed):
        await cell.until(lambda value: value == 1)


async def test_the_first_change_of_any_cell_is_news_and_nothing_within_the_time_is_none():
    first, second, closed = Cell(1), Cell("a"), Cell(1)
    loop = asyncio.get_running_loop()
    loop.call_later(1, closed.close)  # brings no news, and the others still do
    loop.call_later(3, second.set, "b")
    began, news = loop.time(), News(first, second, closed)

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
