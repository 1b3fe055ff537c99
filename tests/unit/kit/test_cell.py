"""A cell publishes state: each follower sees the newest value at its own pace."""

import asyncio

from agent.kit.cell import Cell, News


async def test_there_and_back_again_is_seen_as_a_change():
    cell = Cell("a")
    follower = cell.follow()
    await anext(follower)
    cell.set("b")
    cell.set("a")

    assert "a" == await anext(follower)


async def test_a_change_between_two_waits_is_not_missed():
    cell = Cell(1)
    cursor = News(cell)
    cell.set(2)
    assert await cursor.wait(5)

    cell.set(3)
    await asyncio.sleep(1)

    assert await cursor.wait(5)
    assert not await cursor.wait(5)
