"""Worker: one thread, work in order, a bound on what waits, and an end that nothing can hold up."""

import asyncio
import threading

import pytest
import structlog

from agent.errors import StateError
from agent.host.system import Worker

pytestmark = pytest.mark.looptime(False)


async def test_work_is_done_elsewhere_in_order_and_result_or_error_come_back():
    done: list[object] = []
    async with Worker("disk") as worker:
        thread = await worker.call(threading.current_thread)
        with pytest.raises(ValueError, match="no"):
            await worker.call(int, "no")
        assert 7 == await worker.call(int, "7")
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(worker.call(done.append, number))

    assert list(range(50)) == done
    assert ("disk", True) == (thread.name, thread.daemon)
    thread.join(timeout=5)
    assert not thread.is_alive()


async def test_work_whose_caller_left_is_not_begun():
    begun, gate = asyncio.Event(), threading.Event()
    done: list[object] = []
    loop = asyncio.get_running_loop()

    def block():
        loop.call_soon_threadsafe(begun.set)
        gate.wait(30)

    async with Worker("disk") as worker, asyncio.TaskGroup() as group:
        group.create_task(worker.call(block))
        leaver = group.create_task(worker.call(done.append, "left"))
        await begun.wait()
        leaver.cancel()
        await asyncio.sleep(0)
        gate.set()

    assert [] == done


async def test_work_whose_caller_left_while_it_ran_goes_on_and_bothers_nobody():
    begun, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    ended, bothered = [], []
    loop.set_exception_handler(lambda _, context: bothered.append(context))

    def fail():
        loop.call_soon_threadsafe(begun.set)
        ended.append(gate.wait(30))
        raise ValueError("nobody is there to hear it")

    async with Worker("disk") as worker, asyncio.TaskGroup() as group:
        leaver = group.create_task(worker.call(fail))
        await begun.wait()
        leaver.cancel()
        await asyncio.sleep(0)
        gate.set()

        assert 7 == await worker.call(int, "7")

    assert ([True], []) == (ended, bothered)


async def test_a_thread_that_hangs_is_abandoned_and_what_waits_is_dropped():
    gate, done = threading.Event(), list[object]()
    with structlog.testing.capture_logs() as logs:
        async with Worker("disk", patience=0.05) as worker, asyncio.TaskGroup() as group:
            calls = [worker.call(gate.wait, 30), worker.call(done.append, "never")]
            tasks = [group.create_task(call) for call in calls]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
    gate.set()
    await asyncio.to_thread(worker._queue.put, None)

    assert ["worker.abandoned"] == [line["event"] for line in logs]
    assert [] == done


async def test_a_worker_that_does_not_run_says_so():
    worker = Worker("disk")
    with pytest.raises(StateError, match="disk is not running"):
        await worker.call(int)
    async with worker:
        assert 0 == await worker.call(int)
    with pytest.raises(StateError, match="disk is not running"):
        await worker.call(int)
