"""Who wants quiet gets it when nothing has gone on for long enough, and holds nobody up."""

import asyncio
import contextlib

from agent.kit.lull import Lull


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_where_nothing_ever_went_on_it_is_quiet_at_once():
    began = now()
    await Lull().come(100)

    assert began == now()


async def test_it_is_quiet_so_long_after_the_last_of_several_has_ended():
    lull, began = Lull(), now()

    async def work(seconds: float) -> None:
        with lull.busy():
            await asyncio.sleep(seconds)

    async with asyncio.TaskGroup() as group:
        for seconds in (3, 1, 2):
            group.create_task(work(seconds))
        await asyncio.sleep(0)
        await lull.come(0.5)

    assert 3.5 == now() - began


async def test_what_begins_meanwhile_starts_the_wait_anew():
    lull, began = Lull(), now()
    with lull.busy():
        pass
    async with asyncio.TaskGroup() as group:
        quiet = group.create_task(lull.come(1))
        await asyncio.sleep(0.9)
        with lull.busy():
            await asyncio.sleep(0.3)
        await quiet

    assert 2.2 == round(now() - began, 6)


async def test_work_that_fails_is_over_too():
    lull, began = Lull(), now()
    with contextlib.suppress(ValueError), lull.busy():
        int("no number")
    await lull.come(1)

    assert 1 == now() - began
