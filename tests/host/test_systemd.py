"""Messages to systemd arrive as sd_notify(3) writes them; without a listener nothing breaks."""

import contextlib
import datetime as dt
import socket
import time
import uuid

import pytest
import structlog

from agent.host.process import Systemd, service_notifier

PID = 4711


@contextlib.contextmanager
def listening(address):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        listener.settimeout(5)
        yield listener


@pytest.fixture(params=["path", "abstract"])
def address(request, tmp_path):
    return str(tmp_path / "notify") if request.param == "path" else f"@{uuid.uuid4()}"


def test_each_state_is_one_datagram(address):
    notifier = service_notifier({"NOTIFY_SOCKET": address}, PID)
    with listening(address) as listener:
        notifier.ready()
        notifier.status("serving 80 slices\nof 8 GPUs")
        notifier.alive()
        notifier.stopping()
        received = [listener.recv(1024) for _ in range(4)]

    assert [
        b"READY=1",
        b"STATUS=serving 80 slices of 8 GPUs",
        b"WATCHDOG=1",
        b"STOPPING=1",
    ] == received


def test_a_reload_carries_the_monotonic_clock_in_microseconds(address):
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    with listening(address) as listener:
        Systemd(address).reloading()
        first, second = listener.recv(1024).split(b"\n")
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000

    assert b"RELOADING=1" == first
    assert b"MONOTONIC_USEC" == second.split(b"=")[0]
    assert before <= int(second.split(b"=")[1]) <= after


def test_a_listener_that_left_is_logged_and_no_error(tmp_path):
    with structlog.testing.capture_logs() as logs:
        Systemd(str(tmp_path / "gone")).ready()

    assert [("systemd.not_told", "READY", "No such file or directory")] == [
        (line["event"], line["message"], line["err"]) for line in logs
    ]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WATCHDOG_USEC": "30000000"}, dt.timedelta(seconds=30)),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "4711"}, dt.timedelta(seconds=30)),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "³"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_for_the_process_it_names(environment, expected):
    notifier = service_notifier({"NOTIFY_SOCKET": "/run/notify", **environment}, PID)

    assert expected == notifier.watchdog


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:9"}])
def test_without_a_socket_that_we_know_nobody_is_told(environment):
    notifier = service_notifier(environment, PID)

    notifier.ready()
    notifier.status("x")
    notifier.reloading()
    notifier.alive()
    notifier.stopping()

    assert "" == notifier._address
    assert notifier.watchdog is None
