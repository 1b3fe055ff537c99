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


async def test_who_waits_for_several_cells_goes_on_in_the_next_turn_of_the_loop():
    """So the kubelet hears of a lost GPU before the report and the Events are made."""
    other, cell = Cell(0), Cell(0)

    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(News(other, cell).wait())
        await asyncio.sleep(0)
        cell.set(1)
        await asyncio.sleep(0)

        assert waiting.done()
