"""What the bench reads of a process is what the process itself knows."""

import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.bench import process
from tests.bench.rest import Counter

pytestmark = pytest.mark.looptime(False)
PAGE_FAULTS = (1, 2)
"""An event of perf_event_open(2) that the kernel counts where no processor does."""
PAGES = 1000


def test_the_time_on_a_core_is_that_of_all_threads_and_of_those_that_ended():
    before = time.process_time()
    thread = threading.Thread(target=sum, args=(range(1_000_000),))
    thread.start()
    thread.join()
    seen = process.cpu_seconds(os.getpid())

    assert before < seen <= time.process_time()
    assert seen - before >= 0.005


def test_the_time_of_a_program_is_its_own():
    idle, busy = (
        process.cpu_of(sys.executable, "-I", "-c", code) for code in ("pass", "sum(range(10**7))")
    )

    assert 0 < idle < busy


def test_memory_is_anonymous_or_of_files_and_never_more_than_its_peak():
    weight = process.weight(os.getpid())

    assert weight.resident == weight.anonymous + weight.file
    assert 0 < weight.shared <= weight.resident
    assert weight.resident <= weight.peak + (1 << 20)  # the kernel's counter of it may lag


def test_each_rest_of_a_thread_is_one_wake_up():
    # In a process of its own: a thread that another test left here may end meanwhile.
    rest = "input(); [time.sleep(0.02) for _ in range(20)]"
    resting = f"import time; print(flush=True); {rest}; print(flush=True); input()"
    command = (sys.executable, "-c", resting)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:  # noqa: S603 -- our own
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = process.wake_ups(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        found = process.wake_ups(child.pid) - before
        child.communicate(b"\n")

    assert found >= 20


def test_a_value_between_two_samples_is_on_the_line_between_them():
    samples = [(10.0, 1.0), (12.0, 2.0), (13.0, 4.0)]

    assert [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0] == [
        process.at(moment, samples) for moment in (9.0, 10.0, 11.0, 12.0, 12.5, 13.0, 20.0)
    ]


def test_a_counter_of_the_kernel_counts_the_threads_that_a_process_starts():
    if int(Path("/proc/sys/kernel/perf_event_paranoid").read_text()) > 2:
        pytest.skip("this kernel lets nobody count (perf_event_paranoid)")
    counter = Counter(0, PAGE_FAULTS)
    thread = threading.Thread(target=touch_pages)
    thread.start()
    thread.join()
    counted = counter.read()
    counter.close()

    assert counted >= PAGES


def touch_pages():
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(PAGES):
            memory[page * mmap.PAGESIZE] = 1


def test_an_event_that_nobody_counts_is_an_error():
    with pytest.raises(OSError, match="perf_event_open"):
        Counter(0, (1, 999))
