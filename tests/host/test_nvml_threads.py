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


class Stuck:
    """Work that does not come back until it is let go."""

    def __init__(self) -> None:
        self.entered = 0
        self._gone = threading.Event()

    def __call__(self) -> str:
        self.entered += 1
        self._gone.wait()
        return "late"

    def let_go(self) -> None:
        self._gone.set()


@pytest.fixture
def stuck():
    work = Stuck()
    yield work
    work.let_go()


@pytest.fixture
async def threads():
    return GpuThreads(DEADLINE)


@pytest.fixture
async def patient():
    """Threads whose calls have time enough on a busy machine, too."""
    return GpuThreads(PATIENT)


async def settles(holds) -> None:
    """Until it holds, for a while: nothing tells when a thread ends."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 30
    while not holds():
        assert loop.time() < end
        await asyncio.sleep(0.01)


async def begin(threads: GpuThreads, gpu: str, work, seconds: float = 30.0) -> asyncio.Task:
    """A call that is in the line now."""
    begun = asyncio.get_running_loop().create_task(threads.call(gpu, work, seconds))
    await asyncio.sleep(0)
    return begun


async def hang(threads: GpuThreads, work, *gpus: str) -> None:
    """Have calls about those GPUs given up, all at once."""
    for call in [await begin(threads, gpu, work, DEADLINE) for gpu in gpus]:
        with pytest.raises(TimeoutError):
            await call


async def test_a_loop_that_gets_no_cpu_calls_no_gpu_stuck(threads):
    done = threading.Event()
    async with asyncio.TaskGroup() as group:
        call = group.create_task(threads.call("a", lambda: done.wait(10.0)))
        for _ in range(8):
            await asyncio.sleep(0.011)
            time.sleep(DEADLINE / 2)  # noqa: ASYNC251, TID251 -- that is the trouble
        done.set()

    assert call.result()
    assert "next" == await threads.call("a", lambda: "next")


async def test_an_error_is_the_callers_and_a_late_one_is_not_logged_as_unread(threads, stuck):
    raised: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: raised.append(context.get("exception")))

    def fail() -> None:
        stuck()
        raise OSError("gone")

    await hang(threads, fail, "late")
    stuck.let_go()
    with pytest.raises(OSError, match="gone"):
        await threads.call("a", fail)
    async with asyncio.timeout(30):
        while not await threads.drained():  # noqa: ASYNC110 -- the late one is on its way back
            await asyncio.sleep(0.01)
    gc.collect()

    assert [] == raised


@pytest.fixture
def machine(monkeypatch):
    """Gives threads, or says that there are no more."""
    start, gives = threading.Thread.start, [True]

    def give(thread: threading.Thread) -> None:
        if not gives[-1]:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", give)
    return gives


@pytest.mark.parametrize("comes", ["the call back", "a thread"])
async def test_calls_behind_one_that_hangs_wait_where_the_machine_gives_no_more_threads(
    patient, stuck, machine, comes
):
    first = await begin(patient, "slow", stuck)
    await settles(lambda: stuck.entered == 1)
    machine.append(False)
    second = await begin(patient, "behind", lambda: "behind")
    await asyncio.sleep(0.1)
    assert not second.done()
    if comes == "a thread":
        machine.append(True)
        async with asyncio.timeout(PATIENT):
            assert "behind" == await second
    stuck.let_go()

    assert ["late", "behind"] == [await first, await second]
