"""Threads on a machine that has no more of them: a call is lost, the driver is not."""

import threading

import pytest

from agent.host.nvml.threads import GpuThreads

pytestmark = pytest.mark.looptime(False)


@pytest.fixture
async def threads():
    threads = GpuThreads(0.3)
    yield threads
    threads.close()


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
        threads.launch("a", str)
    assert await threads.empty()
    machine.gives = True

    assert ["1", "2"] == [await threads.call("a", lambda n=n: n) for n in "12"]
    assert "done" == await threads.launch("a", lambda: "done")
    assert 3 == machine.asked
