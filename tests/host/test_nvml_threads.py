"""Threads for calls that may hang: one each, replaced, bounded, and gone when they come back."""

import asyncio
import contextlib
import threading

import pytest

from agent.host.nvml import threads
from agent.host.nvml.threads import MOST_THREADS, THREADS, CallPool

pytestmark = pytest.mark.looptime(False)

DEADLINE = 0.3


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
async def pool(stuck):
    pool = CallPool("tried", DEADLINE)
    yield pool
    stuck.let_go()
    await pool.close()


def alive() -> int:
    return sum(thread.name == "tried" for thread in threading.enumerate())


async def is_emptied_by(pool, stuck) -> bool:
    """Whether the pool is empty once that work is let go, and waited for it until then."""
    async with asyncio.TaskGroup() as tasks:
        emptied = tasks.create_task(pool.empty())
        await asyncio.sleep(0.05)
        assert not emptied.done()
        stuck.let_go()
    return emptied.result()


async def settles(holds) -> None:
    """Until it holds, for a while: nothing tells when a thread ends."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 30
    while not holds():
        assert loop.time() < end
        await asyncio.sleep(0.01)


async def hang(pool: CallPool, work: Stuck, *keys: str) -> None:
    """Have calls with those keys given up, all at once."""

    async def call(key: str) -> None:
        with contextlib.suppress(TimeoutError):
            await pool.call(key, work)

    async with asyncio.TaskGroup() as tasks:
        for key in keys:
            tasks.create_task(call(key))


async def test_results_and_errors_come_back_to_the_caller(pool):
    assert 7 == await pool.call("a", lambda: 7)
    with pytest.raises(ZeroDivisionError):
        await pool.call("a", lambda: 1 // 0)


async def test_more_keys_hang_at_once_than_there_are_threads_and_the_others_are_answered_in_time(
    pool, stuck
):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hang(pool, stuck, *(f"bad {n}" for n in range(2 * THREADS))))
        await settles(lambda: stuck.entered >= THREADS)
        answers = [tasks.create_task(pool.call(f"good {n}", str)) for n in range(8)]

    assert [""] * 8 == [task.result() for task in answers]
    assert 2 * THREADS == len(pool.stuck)


async def test_a_key_holds_one_thread_whatever_is_asked_about_it(pool, stuck):
    await hang(pool, stuck, *["a"] * 10)

    assert (1, {"a"}) == (stuck.entered, pool.stuck)
    with pytest.raises(TimeoutError, match="an earlier call about a has not come back"):
        await pool.call("a", lambda: 1)
    assert 1 == await pool.call("b", lambda: 1)


async def test_what_is_launched_outlives_whoever_waits_for_it(pool, stuck):
    future = pool.launch("a", stuck)
    await asyncio.wait([future], timeout=2 * DEADLINE)
    assert (frozenset(), False) == (pool.stuck, future.done())
    stuck.let_go()

    assert "late" == await future


async def test_what_is_launched_waits_in_line_and_is_refused_behind_a_stuck_call(pool, stuck):
    first, second = pool.launch("a", stuck), pool.launch("a", lambda: "second")
    stuck.let_go()
    assert ["late", "second"] == [await first, await second]

    other = Stuck()
    await hang(pool, other, "b")
    with pytest.raises(TimeoutError, match="has not come back"):
        pool.launch("b", str)
    other.let_go()


async def test_the_pool_is_empty_once_the_last_call_has_left(pool, stuck):
    assert await pool.empty()
    pool.launch("a", stuck)
    await settles(lambda: stuck.entered == 1)
    assert await is_emptied_by(pool, stuck)


async def test_a_call_whose_caller_has_left_early_is_waited_for_until_its_time_is_up(pool, stuck):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await pool.call("a", stuck)
    assert frozenset() == pool.stuck
    assert await is_emptied_by(pool, stuck)


async def test_nobody_waits_for_a_call_whose_time_is_up(pool, stuck):
    pool.launch("a", stuck)
    assert not await pool.empty()
    begun = asyncio.get_running_loop().time()
    assert not await pool.empty()
    assert asyncio.get_running_loop().time() - begun < DEADLINE
    stuck.let_go()
    assert "b" == await pool.call("a", lambda: "b")  # in the same line, behind it

    assert await pool.empty()


async def test_nobody_waits_for_a_stuck_call_again(pool, stuck):
    await hang(pool, stuck, "a")
    await pool.call("b", str)
    begun = asyncio.get_running_loop().time()

    assert not await pool.empty()
    assert asyncio.get_running_loop().time() - begun < DEADLINE


async def test_calls_with_one_key_run_one_after_the_other(pool):
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

    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(pool.call("a", work))

    assert 1 == most


async def test_a_call_that_is_given_up_in_the_line_is_never_made(pool, stuck):
    made: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hang(pool, stuck, "a"))
        await settles(lambda: stuck.entered == 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await pool.call("a", lambda: made.append("made"))
    stuck.let_go()
    await settles(lambda: not pool.stuck)

    assert "again" == await pool.call("a", lambda: "again")
    assert [] == made


async def test_all_threads_are_accounted_for_once_all_calls_are_back(pool, stuck):
    keys = [f"bad {n}" for n in range(3 * THREADS)]
    await hang(pool, stuck, *keys)
    assert len(keys) <= alive() == pool.threads <= THREADS + len(keys)
    stuck.let_go()
    await settles(lambda: not pool.stuck)
    for _ in range(3 * THREADS):
        await pool.call("good", lambda: 1)
    await settles(lambda: alive() <= THREADS)

    assert pool.threads == alive()


async def test_there_are_never_more_threads_than_the_limit(pool, stuck):
    keys = [f"bad {n}" for n in range(MOST_THREADS + 20)]
    await hang(pool, stuck, *keys)
    await hang(pool, stuck, *(key + " again" for key in keys))

    assert MOST_THREADS == alive() == pool.threads
    stuck.let_go()
    await settles(lambda: not pool.stuck)
    assert 1 == await pool.call("good", lambda: 1)


async def test_the_time_of_a_call_begins_when_those_before_it_have_come_back(pool):
    slow = threading.Event()

    def work() -> str:
        slow.wait(0.7 * DEADLINE)
        return "in time"

    async with asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(pool.call("a", work)) for _ in range(2)]

    assert ["in time"] * 2 == [answer.result() for answer in answers]


async def test_a_call_behind_many_slow_ones_waits_for_a_bounded_time_and_says_so(pool):
    slow = threading.Event()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for _ in range(4):
        pool.launch("a", lambda: slow.wait(0.7 * DEADLINE))
    with pytest.raises(TimeoutError, match="earlier calls about a take too long"):
        await pool.call("a", str)

    assert loop.time() - begun < 2 * DEADLINE
    slow.set()
    assert await pool.empty()


async def test_a_call_whose_caller_left_early_and_which_comes_back_in_time_was_not_stuck(pool):
    slow = threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3 * DEADLINE):
            await pool.call("a", lambda: slow.wait(0.8 * DEADLINE))

    assert "next" == await pool.call("a", lambda: "next")


async def test_a_late_result_is_given_to_whom_it_is_still_of_use(pool, stuck):
    late: list[str] = []
    with pytest.raises(TimeoutError):
        await pool.call("a", stuck, late.append)
    assert "b" == await pool.call("b", lambda: "b", late.append)
    stuck.let_go()
    await settles(lambda: not pool.stuck)

    assert ["late"] == late


async def test_a_key_that_is_stuck_no_more_is_told_and_can_be_called_at_once(stuck):
    told: list[tuple[str, str]] = []

    def back(key: str) -> None:
        asked = own.post(key, lambda: "answer", lambda _: None)
        asked.add_done_callback(lambda done: told.append((key, done.result())))

    own = CallPool("tried", DEADLINE, back)
    await hang(own, stuck, "a")
    await own.call("b", str)
    assert [] == told
    stuck.let_go()
    await settles(lambda: bool(told))
    await own.close()

    assert [("a", "answer")] == told


async def test_close_waits_for_all_but_the_stuck(pool, stuck):
    await hang(pool, stuck, "a")
    await pool.call("b", lambda: 1)
    await pool.close()
    await settles(lambda: alive() == 1)
    stuck.let_go()

    await settles(lambda: alive() == 0)


async def test_a_loop_that_is_gone_stops_no_thread_from_going_home(monkeypatch):
    monkeypatch.setattr(threads, "FAREWELL", 0.01)
    work = Stuck()

    async def leave() -> None:
        with contextlib.suppress(TimeoutError):
            await CallPool("tried", 0.01).call("a", work)

    await asyncio.to_thread(asyncio.run, leave())
    assert 1 == alive()
    work.let_go()

    await settles(lambda: alive() == 0)
