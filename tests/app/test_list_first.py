"""The list of a GPU that fell ill is made with the verdict: it waits for no follower's turn."""

import asyncio

from tests.app.front_node import joined
from tests.builders import a_gpu, a_uuid
from tests.fakes.driver import ScriptedDriver


async def test_a_verdict_makes_the_list_although_nobody_follows_the_inventory():
    driver = ScriptedDriver([a_gpu(index=number) for number in range(2)])
    front = joined(driver)
    knowing = front.knowing
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run()) for run in (knowing.discovery.run, knowing.health.run)]
        await asyncio.sleep(0.1)
        knowing.listing.refresh()
        assert [True, True] == [one.healthy for one in front.facts.slices.value.groups]

        driver.xid(a_uuid(1), 48)
        await asyncio.sleep(0.1)

        assert [True, False] == [one.healthy for one in front.facts.slices.value.groups]
        for task in tasks:
            task.cancel()
