"""Threads for calls that may hang: one for all GPUs that answer, and one for each other."""

import asyncio
import gc
import threading
import time

import pytest

from agent.gpu.nvml import GpuThreads

pytestmark = pytest.mark.looptime(False)

DEADLINE = 0.5
"""Seconds of calls that are to be given up."""
PATIENT = 2.0


@pytest.fixture
def gate():
    """What a call that hangs waits for."""
    opened = threading.Event()
    yield opened
    opened.set()


async def test_a_loop_that_gets_no_cpu_calls_no_gpu_stuck():
    threads, done = GpuThreads(DEADLINE), threading.Event()
    async with asyncio.TaskGroup() as group:
        call = group.create_task(threads.call("a", lambda: done.wait(10.0)))
        for _ in range(8):
            await asyncio.sleep(0.011)
            time.sleep(DEADLINE / 2)  # noqa: ASYNC251, TID251 -- that is the trouble
        done.set()

    assert call.result()
    assert "next" == await threads.call("a", lambda: "next")


async def test_an_error_is_the_callers_and_a_late_one_is_not_logged_as_unread(gate):
    threads, raised = GpuThreads(DEADLINE), list[object]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: raised.append(context.get("exception")))

    def fail() -> None:
        gate.wait()
        raise OSError("gone")

    with pytest.raises(TimeoutError):
        await threads.call("late", fail)
    gate.set()
    with pytest.raises(OSError, match="gone"):
        await threads.call("a", fail)
    async with asyncio.timeout(30):
        while not await threads.drained():  # noqa: ASYNC110 -- the late one is on its way back
            await asyncio.sleep(0.01)
    gc.collect()

    assert [] == raised


@pytest.mark.parametrize("comes", ["the call back", "a thread"])
async def test_calls_behind_one_that_hangs_wait_where_the_machine_gives_no_more_threads(
    gate, monkeypatch, comes
):
    threads, entered = GpuThreads(PATIENT), threading.Event()
    start, gives = threading.Thread.start, [True]

    def give(thread: threading.Thread) -> None:
        if not gives[-1]:
            raise RuntimeError("can't start new thread")
        start(thread)

    def hang() -> str:
        entered.set()
        gate.wait()
        return "late"

    monkeypatch.setattr(threading.Thread, "start", give)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(threads.call("slow", hang, 30.0))
        await asyncio.to_thread(entered.wait)
        gives.append(False)
        second = tasks.create_task(threads.call("behind", lambda: "behind", 30.0))
        await asyncio.sleep(0.1)
        assert not second.done()
        if comes == "a thread":
            gives.append(True)
            async with asyncio.timeout(PATIENT):
                assert "behind" == await second
        gate.set()
    gives.append(True)

    assert ["late", "behind"] == [first.result(), second.result()]
