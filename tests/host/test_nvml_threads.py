"""Threads for calls that may hang: one for all GPUs that answer, and one for each other."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

import pytest

from agent.gpu.threads import GpuThreads

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
async def stuck():
    work = Stuck()
    yield work
    work.let_go()


@pytest.fixture
async def threads(stuck):
    threads = GpuThreads(DEADLINE)
    yield threads
    stuck.let_go()
    threads.close()


@pytest.fixture
async def patient():
    """Threads whose calls have time enough on a busy machine, too."""
    threads = GpuThreads(PATIENT)
    yield threads
    threads.close()


@pytest.fixture
def alive():
    """How many threads there are beside those of drivers that other tests have left behind."""
    before = set(threading.enumerate())

    def count() -> int:
        mine = set(threading.enumerate()) - before
        return sum(thread.name.startswith("nvml ") for thread in mine)

    return count


async def settles(holds) -> None:
    """Until it holds, for a while: nothing tells when a thread ends."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 30
    while not holds():
        assert loop.time() < end
        await asyncio.sleep(0.01)


async def begin(threads: GpuThreads, gpu: str, work) -> "asyncio.Future[object]":
    """A call without a deadline, and what becomes of it."""

    async def call() -> object:
        return await (await threads.launch(gpu, work))

    begun = asyncio.get_running_loop().create_task(call())
    await asyncio.sleep(0)
    return begun


async def hang(threads: GpuThreads, work: Callable[[], object], *gpus: str) -> None:
    """Have calls about those GPUs given up, all at once."""

    async def call(gpu: str) -> None:
        with contextlib.suppress(TimeoutError):
            await threads.call(gpu, work)

    async with asyncio.TaskGroup() as tasks:
        for gpu in gpus:
            tasks.create_task(call(gpu))


async def test_a_loop_that_gets_no_cpu_calls_no_gpu_stuck():
    threads, done = GpuThreads(DEADLINE), threading.Event()
    async with asyncio.TaskGroup() as group:
        call = group.create_task(threads.call("a", lambda: done.wait(10.0)))
        for _ in range(8):
            await asyncio.sleep(0.011)
            time.sleep(DEADLINE / 2)  # noqa: ASYNC251, TID251 -- that is the trouble
        done.set()

    assert call.result()
    assert not threads.stuck
    threads.close()


async def test_what_is_launched_outlives_its_waiter_and_is_refused_behind_a_stuck_call(
    threads, stuck
):
    first = await begin(threads, "a", stuck)
    await asyncio.wait([first], timeout=2 * DEADLINE)
    assert (frozenset(), False) == (threads.stuck, first.done())
    with pytest.raises(TimeoutError, match="earlier calls about a take too long"):
        await threads.call("a", str)
    stuck.let_go()
    assert "late" == await first

    other = Stuck()
    await hang(threads, other, "b")
    with pytest.raises(TimeoutError, match="has not returned"):
        await threads.launch("b", str)
    other.let_go()


@pytest.mark.parametrize("leaves_early", [False, True])
async def test_nobody_is_inside_once_the_last_call_has_left(patient, stuck, leaves_early):
    assert await patient.empty()
    if leaves_early:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await patient.call("a", stuck)
    else:
        await begin(patient, "a", stuck)
        await settles(lambda: stuck.entered == 1)
    assert frozenset() == patient.stuck
    async with asyncio.TaskGroup() as tasks:
        emptied = tasks.create_task(patient.empty())
        await asyncio.sleep(0.05)
        assert not emptied.done()
        stuck.let_go()

    assert emptied.result()
    assert "next" == await patient.call("a", lambda: "next")


async def test_what_waits_behind_a_call_that_gets_stuck_is_refused(threads, stuck):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hang(threads, stuck, "a"))
        await settles(lambda: stuck.entered == 1)
        behind = await begin(threads, "a", str)
        with pytest.raises(TimeoutError, match="has not returned"):
            async with asyncio.timeout(PATIENT):
                await behind


async def test_nobody_waits_for_a_call_whose_time_is_up(patient, stuck):
    await begin(patient, "a", stuck)
    assert not await patient.empty()
    begun = asyncio.get_running_loop().time()
    assert not await patient.empty()
    assert asyncio.get_running_loop().time() - begun < PATIENT
    stuck.let_go()
    assert "b" == await patient.call("a", lambda: "b")  # in the same line, behind it

    assert await patient.empty()
    other = Stuck()
    await hang(patient, other, "c")  # and nobody waits for a stuck one again
    begun = asyncio.get_running_loop().time()
    assert not await patient.empty()
    assert asyncio.get_running_loop().time() - begun < PATIENT
    other.let_go()


async def test_calls_about_one_gpu_run_one_after_the_other(threads):
    running, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1

    for launched in [await begin(threads, "a", work) for _ in range(8)]:
        await launched

    assert 1 == most


async def test_a_call_that_is_given_up_in_the_line_is_never_made(threads, stuck):
    made: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hang(threads, stuck, "a"))
        await settles(lambda: stuck.entered == 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await threads.call("a", lambda: made.append("made"))
    stuck.let_go()
    await settles(lambda: not threads.stuck)

    assert "again" == await threads.call("a", lambda: "again")
    assert [] == made


async def test_each_call_that_hangs_holds_a_thread_until_it_is_back(threads, stuck, alive):
    await hang(threads, stuck, "a", "b")
    await threads.call("c", str)
    assert 3 == alive()
    stuck.let_go()
    await settles(lambda: not threads.stuck)

    await settles(lambda: alive() == 1)
    assert ["0", "1", "2"] == [await threads.call("abc"[n], lambda n=n: str(n)) for n in range(3)]


async def test_nothing_is_kept_of_a_gpu_about_which_no_call_runs(threads, stuck):
    await hang(threads, stuck, "stuck")
    await threads.call("here", str)
    assert {"stuck"} == threads._lines.keys()
    stuck.let_go()
    await settles(lambda: not threads._lines)

    assert "again" == await threads.call("stuck", lambda: "again")


async def test_calls_of_one_turn_share_a_thread_and_wake_the_loop_once(patient, alive, monkeypatch):
    loop, wakes = asyncio.get_running_loop(), list[object]()
    tell = loop.call_soon_threadsafe
    names = [str(number) for number in range(8)]

    def count(callback, *args):
        wakes.append(callback)
        return tell(callback, *args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(patient.call(name, lambda name=name: name)) for name in names]

    assert names == [call.result() for call in calls]
    assert (1, 1) == (len(wakes), alive())


async def test_calls_behind_one_that_hangs_are_made_at_once_each_on_its_own(patient, stuck, alive):
    slow = await begin(patient, "slow", stuck)
    others = [await begin(patient, f"other {number}", stuck) for number in range(3)]
    quick = await begin(patient, "quick", lambda: "quick")

    assert "quick" == await quick
    await settles(lambda: stuck.entered == 4)
    assert 4 <= alive() <= 5
    stuck.let_go()
    assert 4 * ["late"] == [await each for each in (slow, *others)]
    await settles(lambda: alive() == 1)


async def test_a_call_behind_many_slow_ones_waits_for_a_bounded_time_and_says_so(patient):
    slow, done = threading.Event(), list[bool]()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            work = lambda: done.append(slow.wait(0.7 * PATIENT))  # noqa: E731
            tasks.create_task(hang(patient, work, "a"))
        await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError, match="earlier calls about a take too long"):
            await patient.call("a", str)

    assert len(done) < 4
    slow.set()
    assert await patient.empty()


async def test_a_gpu_that_is_stuck_no_more_is_told_and_can_be_called_at_once(stuck):
    told = list[tuple[str, frozenset[str]]]()
    own = GpuThreads(DEADLINE, lambda gpu: told.append((gpu, own.stuck)))
    await hang(own, stuck, "a")
    await own.call("b", str)
    assert [] == told
    stuck.let_go()
    await settles(lambda: bool(told))

    assert "answer" == await own.call("a", lambda: "answer")
    assert [("a", frozenset())] == told
    own.close()


async def test_close_sends_all_home_but_those_that_hang(threads, stuck, alive):
    await hang(threads, stuck, "a")
    await threads.call("b", lambda: 1)
    threads.close()
    await settles(lambda: alive() == 1)
    stuck.let_go()

    await settles(lambda: alive() == 0)


async def test_a_loop_that_is_gone_stops_no_thread_from_going_home(alive):
    work = Stuck()

    async def leave() -> None:
        with contextlib.suppress(TimeoutError):
            await GpuThreads(0.01).call("a", work)

    await asyncio.to_thread(asyncio.run, leave())
    assert 1 == alive()
    work.let_go()

    await settles(lambda: alive() == 0)


class BusyMachine:
    """Gives threads, or says that there are no more."""

    def __init__(self, monkeypatch) -> None:
        self.gives = True
        self.asked = 0
        start = threading.Thread.start

        def give(thread: threading.Thread) -> None:
            self.asked += 1
            if not self.gives:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", give)


async def test_a_machine_that_gives_no_thread_costs_a_call_its_answer_and_no_more(
    threads, monkeypatch
):
    machine = BusyMachine(monkeypatch)
    machine.gives = False
    with pytest.raises(TimeoutError, match="no thread can be started for the call: can't start"):
        await threads.call("a", str)
    with pytest.raises(TimeoutError, match="no thread can be started"):
        await threads.launch("a", str)
    assert await threads.empty()
    machine.gives = True

    assert ["1", "2"] == [await threads.call("a", lambda n=n: n) for n in "12"]
    assert 3 == machine.asked


@pytest.mark.parametrize("comes", ["the call back", "a thread"])
async def test_calls_behind_one_that_hangs_wait_where_the_machine_gives_no_more_threads(
    patient, stuck, monkeypatch, comes
):
    machine = BusyMachine(monkeypatch)
    first = await begin(patient, "slow", stuck)
    await settles(lambda: stuck.entered == 1)
    machine.gives = False
    second = await begin(patient, "behind", lambda: "behind")
    await settles(lambda: machine.asked > 1)
    with pytest.raises(TimeoutError, match="no thread can be started"):
        await patient.launch("later", lambda: "later")
    if comes == "a thread":
        machine.gives = True
        async with asyncio.timeout(PATIENT):
            assert "behind" == await second
    stuck.let_go()

    assert ["late", "behind"] == [await first, await second]
    assert "later" == await patient.call("later", lambda: "later")


async def test_an_error_while_one_call_lands_keeps_no_other_from_its_caller(patient):
    raised: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: raised.append(context.get("exception")))

    def odd() -> str:
        raise StopIteration  # no future takes it

    await begin(patient, "odd", odd)
    even = await begin(patient, "even", lambda: "even")

    assert "even" == await even
    assert [TypeError] == [type(error) for error in raised]
