"""Threads on a machine that has no more of them: a call is lost, the driver is not."""

import asyncio
import threading

import pytest

from agent.host.nvml.threads import CallPool
from tests.fakes.nvml import until

pytestmark = pytest.mark.looptime(False)


@pytest.fixture
async def pool():
    pool = CallPool("tried", 0.3)
    yield pool
    await pool.close()


class Machine:
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
    pool, monkeypatch
):
    machine = Machine(monkeypatch)
    machine.gives = False
    with pytest.raises(TimeoutError, match="no thread was free"):
        await pool.call("a", str)
    assert 0 == pool.threads
    machine.gives = True

    assert ["1", "2"] == [await pool.call("a", lambda n=n: n) for n in "12"]
    assert 1 == pool.threads


async def test_what_is_launched_waits_for_a_machine_that_gives_a_thread_again(pool, monkeypatch):
    machine = Machine(monkeypatch)
    machine.gives = False
    launched = pool.launch("a", lambda: "done")
    await until(lambda: machine.asked > 1)
    machine.gives = True
    async with asyncio.timeout(30):
        assert "done" == await launched
