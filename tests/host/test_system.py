"""The host as this process meets it: its worker thread, systemd, and what the host shows."""

import asyncio
import contextlib
import errno
import os
import socket
import threading
import time
import uuid

import pytest
import structlog

from agent.errors import StateError
from agent.host import node as surroundings
from agent.host.node import foreign_plugins, write_failure
from agent.host.system import BOOT_ID, Systemd, Worker, host_name, read_id

# Worker: one thread, work in order, a bound on what waits, and an end that nothing can hold up.


@pytest.mark.looptime(False)
async def test_work_is_done_elsewhere_in_order_and_result_or_error_come_back():
    done = []
    worker = Worker("disk")
    for is_begun in (False, True):
        with pytest.raises(StateError, match="disk is not running"):
            await worker.call(int)
        if is_begun:
            break
        async with worker:
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


@pytest.mark.looptime(False)
@pytest.mark.parametrize("is_begun", [False, True])
async def test_work_whose_caller_left_is_not_begun_or_goes_on_and_bothers_nobody(is_begun):
    begun, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    ended, bothered = [], []
    loop.set_exception_handler(lambda _, context: bothered.append(context))

    def block():
        loop.call_soon_threadsafe(begun.set)
        return gate.wait(30)

    def work():
        ended.append(block())
        raise ValueError("nobody is there to hear it")

    async with Worker("disk") as worker, asyncio.TaskGroup() as group:
        leaver = group.create_task(worker.call(work) if is_begun else worker.call(block))
        await begun.wait()
        if not is_begun:
            leaver = group.create_task(worker.call(ended.append, "left"))
            await asyncio.sleep(0)
        leaver.cancel()
        await asyncio.sleep(0)
        gate.set()
        assert 7 == await worker.call(int, "7")

    assert ([True] * is_begun, []) == (ended, bothered)


@pytest.mark.looptime(False)
async def test_a_thread_that_hangs_is_abandoned_and_what_waits_is_dropped():
    gate, done = threading.Event(), []
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


# Messages to systemd arrive as sd_notify(3) writes them; without a listener nothing breaks.


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_each_message_is_one_datagram_and_a_reload_carries_the_monotonic_clock(kind, tmp_path):
    address = str(tmp_path / "notify") if kind == "path" else f"@{uuid.uuid4()}"
    notifier = Systemd({"NOTIFY_SOCKET": address})
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address.replace("@", "\0", 1))
        listener.settimeout(5)
        notifier.tell("READY=1")
        notifier.reloading()
        ready, reloading = listener.recv(1024), listener.recv(1024)
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000

    word, _, stamp = reloading.partition(b"\nMONOTONIC_USEC=")
    assert (b"READY=1", b"RELOADING=1") == (ready, word)
    assert before <= int(stamp) <= after


@pytest.mark.parametrize(
    ("address", "told"),
    [("/gone/notify", ["systemd.not_told"]), ("vsock:2:9", ["systemd.not_told"]), ("", [])],
)
def test_a_manager_that_cannot_be_told_is_logged_and_no_error(address, told):
    with structlog.testing.capture_logs() as logs:
        Systemd({"NOTIFY_SOCKET": address} if address else {}).tell("READY=1")

    assert told == [line["event"] for line in logs]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, 0),
        ({"WATCHDOG_USEC": "30000000", "NOTIFY_SOCKET": ""}, 0),
        *(({"WATCHDOG_USEC": text}, 0) for text in ("0", "soon", "³")),
        ({}, 0),
    ],
)
def test_the_watchdog_is_for_the_process_it_names(environment, expected):
    assert expected == Systemd({"NOTIFY_SOCKET": "/run/notify", **environment}).watchdog


# Names, paths and sockets, as this host shows them.


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_why_nothing_can_be_written_is_told(tmp_path, monkeypatch, code):
    (tmp_path / "file").touch()
    assert (0, errno.ENOTDIR) == (write_failure(tmp_path), write_failure(tmp_path / "file"))

    def refuse(directory, name):
        raise OSError(code, os.strerror(code), name)

    monkeypatch.setattr("os.access", lambda *_: False)
    assert errno.EACCES == write_failure(tmp_path)
    monkeypatch.setattr(surroundings, "check_writable", refuse)
    assert code == write_failure(tmp_path)


def test_a_foreign_plugin_is_a_socket_of_its_name_with_a_listener(tmp_path):
    with contextlib.ExitStack() as opened:
        for name in ("kubelet.sock", "nvidia-gpu.sock", "nvidia-dead.sock"):
            one = opened.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(str(tmp_path / name))
            if "dead" not in name:
                one.listen()
        (tmp_path / "nvidia-file").touch()

        assert [str(tmp_path / "nvidia-gpu.sock")] == foreign_plugins(tmp_path)
    assert [] == foreign_plugins(tmp_path / "none")


def test_the_host_has_the_name_its_kubelet_gives_the_node_and_ids_without_the_line_end(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(socket, "gethostname", lambda: " GPU-Node.Example ")
    (tmp_path / "id").write_text("2f7c7a3e\n")

    assert "gpu-node.example" == host_name()
    assert ["2f7c7a3e", "", ""] == [read_id(tmp_path / name) for name in ("id", "missing", "")]
    assert 36 == len(read_id(BOOT_ID))
