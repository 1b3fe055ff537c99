"""Messages to systemd arrive as sd_notify(3) writes them; without a listener nothing breaks."""

import contextlib
import os
import socket
import time
import uuid

import pytest
import structlog

from agent.host.system import Systemd


@contextlib.contextmanager
def listening(address):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        listener.settimeout(5)
        yield listener


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_each_message_is_one_datagram_and_a_reload_carries_the_monotonic_clock(kind, tmp_path):
    address = str(tmp_path / "notify") if kind == "path" else f"@{uuid.uuid4()}"
    notifier = Systemd({"NOTIFY_SOCKET": address})
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    with listening(address) as listener:
        notifier.tell("READY=1")
        notifier.reloading()
        ready, reloading = listener.recv(1024), listener.recv(1024)
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000

    assert (b"READY=1", b"RELOADING=1") == (ready, reloading.split(b"\n")[0])
    name, stamp = reloading.split(b"\n")[1].split(b"=")
    assert b"MONOTONIC_USEC" == name
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
        ({"WATCHDOG_USEC": "0"}, 0),
        ({"WATCHDOG_USEC": "soon"}, 0),
        ({"WATCHDOG_USEC": "³"}, 0),
        ({}, 0),
    ],
)
def test_the_watchdog_is_for_the_process_it_names(environment, expected):
    assert expected == Systemd({"NOTIFY_SOCKET": "/run/notify", **environment}).watchdog
