"""A cell publishes state: each follower sees the newest value at its own pace, and then the end."""

import asyncio

import pytest

from agent.kit.cell import Cell, CellClosed, News


async def collect(cell, into, pause=0.0):
    async for value in cell.follow():
        into.append(value)
        await asyncio.sleep(pause)


async def test_a_follower_sees_the_present_value_first():
    cell = Cell(7)

    assert 7 == await anext(cell.follow())


async def test_a_follower_sees_each_change_it_has_time_for():
    cell = Cell(0)
    seen: list[object] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(collect(cell, seen))
        for value in (1, 2, 3):
            await asyncio.sleep(1)
            cell.set(value)
        await asyncio.sleep(1)
        cell.close()

    assert [0, 1, 2, 3] == seen


async def test_a_slow_follower_skips_to_the_newest_and_does_not_hold_the_quick_one():
    cell = Cell(0)
    quick: list[int] = []
    slow: list[int] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(collect(cell, quick))
        group.create_task(collect(cell, slow, pause=10.0))
        for value in (1, 2, 3):
            await asyncio.sleep(1)
            cell.set(value)
        await asyncio.sleep(20)
        cell.close()

    assert [0, 1, 2, 3] == quick
    assert [0, 3] == slow


async def test_a_value_set_again_is_not_published():
    cell: Cell[tuple[int, ...]] = Cell((1, 2))
    seen: list[object] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(collect(cell, seen))
        await asyncio.sleep(1)
        assert not cell.set((1, 2))
        await asyncio.sleep(1)
        assert cell.set((3,))
        await asyncio.sleep(1)
        cell.close()

    assert [(1, 2), (3,)] == seen


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


async def test_closing_ends_followers_after_the_newest_value():
    cell = Cell(0)
    follower = cell.follow()
    await anext(follower)
    cell.set(1)
    cell.close()
    cell.close()

    assert [1] == [value async for value in follower]
    assert cell.closed


async def test_a_follower_of_a_closed_cell_sees_one_value_and_ends():
    cell = Cell(5)
    cell.close()

    assert [5] == [value async for value in cell.follow()]


async def test_a_closed_cell_keeps_the_newest_value_but_tells_nobody():
    cell = Cell(5)
    follower = cell.follow()
    await anext(follower)
    cell.close()

    assert cell.set(6)
    assert 6 == cell.value
    assert [] == [value async for value in follower]


async def test_until_returns_the_first_value_that_fits():
    cell = Cell(0)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(cell.until(lambda value: value >= 2))
        for value in (1, 2, 3):
            await asyncio.sleep(1)
            cell.set(value)

    assert 2 == waiting.result()


async def test_until_looks_at_the_present_value():
    assert 4 == await Cell(4).until(lambda value: value == 4)


async def test_until_says_when_the_cell_was_closed_before():
    cell = Cell(0)
    cell.close()

    with pytest.raises(CellClosed):
        await cell.until(lambda value: value == 1)


async def test_a_cancelled_follower_leaves_the_others_alone():
    cell = Cell(0)
    seen: list[object] = []
    async with asyncio.TaskGroup() as group:
        leaver = group.create_task(collect(cell, []))
        group.create_task(collect(cell, seen))
        await asyncio.sleep(1)
        leaver.cancel()
        await asyncio.sleep(1)
        cell.set(1)
        await asyncio.sleep(1)
        cell.close()

    assert [0, 1] == seen


async def test_the_first_change_of_any_cell_is_news():
    first, second = Cell(1), Cell("a")
    asyncio.get_running_loop().call_later(3, second.set, "b")

    assert await News(first, second).wait()


async def test_nothing_within_the_time_is_no_news():
    began = asyncio.get_running_loop().time()

    assert not await News(Cell(1)).wait(5)

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

    assert await News(closed, other).wait(9)

    assert 2 == pytest.approx(asyncio.get_running_loop().time() - began)


async def test_a_waiter_can_be_cancelled_and_leaves_nothing_behind():
    cell = Cell(1)
    before = asyncio.all_tasks()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(News(cell).wait())
        await asyncio.sleep(1)
        waiting.cancel()

    assert waiting.cancelled()
    assert before == asyncio.all_tasks()
