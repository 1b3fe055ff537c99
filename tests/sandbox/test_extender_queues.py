"""What waits inside the extender: Events for their sending, and calls about the same pod."""

import asyncio
import gc

from agent.sandbox.api_errors import Json
from agent.sandbox.extender.events import EventQueue
from agent.sandbox.extender.turns import Turns
from agent.sandbox.scheduler.filter import NORMAL, Notice

POD: Json = {"metadata": {"namespace": "d", "name": "p", "uid": "u", "labels": {}}, "spec": {}}


class Slow:
    """Takes one Event in each second."""

    def __init__(self) -> None:
        self.told: list[tuple[Json, str]] = []

    async def record(self, pod: Json, notice: Notice) -> None:
        await asyncio.sleep(1)
        self.told.append((pod, notice.message))


def notice(text: str) -> Notice:
    return Notice(NORMAL, "Told", text)


async def test_events_are_sent_in_their_order_by_who_runs_the_queue() -> None:
    slow = Slow()
    queue = EventQueue(slow)
    began = asyncio.get_running_loop().time()
    for text in ("one", "two"):
        await queue.record(POD, notice(text))
    assert began == asyncio.get_running_loop().time()

    async with asyncio.TaskGroup() as group:
        running = group.create_task(queue.run())
        await asyncio.sleep(2.5)
        running.cancel()

    assert ["one", "two"] == [text for _, text in slow.told]
    assert {"namespace": "d", "name": "p", "uid": "u"} == slow.told[0][0]["metadata"]


async def test_what_comes_when_too_many_events_wait_is_dropped() -> None:
    slow = Slow()
    queue = EventQueue(slow, capacity=2)
    for text in ("one", "two", "three"):
        await queue.record(POD, notice(text))

    async with asyncio.TaskGroup() as group:
        running = group.create_task(queue.run())
        await asyncio.sleep(10)
        running.cancel()

    assert ["one", "two"] == [text for _, text in slow.told]


async def test_only_those_of_the_same_key_wait_for_each_other() -> None:
    turns, done = Turns(), list[str]()

    async def work(key: str) -> None:
        async with turns.of(key):
            await asyncio.sleep(1)
            done.append(f"{key}{asyncio.get_running_loop().time() - began:.0f}")

    began = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        for key in ("a", "a", "b"):
            group.create_task(work(key))

    assert ["a1", "b1", "a2"] == done
    gc.collect()
    assert 0 == len(turns)


async def test_who_gives_up_waiting_leaves_the_turn_to_the_next() -> None:
    turns = Turns()

    async def wait(within: float) -> bool:
        try:
            async with asyncio.timeout(within), turns.of("a"):
                await asyncio.sleep(2)
        except TimeoutError:
            return False
        return True

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(wait(within)) for within in (5, 1, 5)]

    assert [True, False, True] == [task.result() for task in tasks]
