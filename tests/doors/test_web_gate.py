"""The gate before the web door: who is let in, who gives way, and how long each may take."""

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest
import structlog
from aiohttp import web

from agent.web import server as gate
from tests.doors.web_client import GET, PAGES, raw, serving

BURST = 300

pytestmark = pytest.mark.looptime(False)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However slow the machine, nobody is closed for his time but where that is the claim."""
    monkeypatch.setattr(gate, "HEAD_TIMEOUT", 60.0)


async def test_a_head_of_many_times_its_bound_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(gate, "HEAD_TIMEOUT", 0.5)
    many = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 8000) for number in range(100))
    async with serving(PAGES) as (port, _):
        with contextlib.suppress(ConnectionError):
            assert b"" == await raw(port, GET[:-2] + many + b"\r\n")


async def test_a_client_that_sends_no_head_is_closed(monkeypatch):
    monkeypatch.setattr(gate, "HEAD_TIMEOUT", 0.05)
    async with serving(PAGES) as (port, _):
        with contextlib.suppress(ConnectionResetError):
            assert b"" == await raw(port, b"GET /hello HTTP/1.1\r\nX-Slow: ")


class RawLines:
    """A log that can be waited for."""

    def __init__(self):
        self.told = asyncio.Event()

    def info(self, event, **_):
        if event == "web.client_too_slow":
            self.told.set()


async def test_a_client_that_takes_no_answer_is_closed(monkeypatch):
    monkeypatch.setattr(gate, "ANSWER_TIMEOUT", 0.05)
    monkeypatch.setattr(gate, "log", lines := RawLines())
    pages = {"/large": lambda _: web.Response(body=b"x" * 64_000_000)}
    async with serving(pages) as (port, _):
        with socket.socket() as lazy:
            lazy.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(lazy, ("127.0.0.1", port))
            await loop.sock_sendall(lazy, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            await lines.told.wait()
            received = bytearray()
            while chunk := await loop.sock_recv(lazy, 1 << 20):
                received += chunk

    assert received.startswith(b"HTTP/1.1 200")
    assert len(received) < 64_000_000


@contextlib.asynccontextmanager
async def connected(port, count, source="127.0.0.1", sent=GET[:1]):
    """That many connections, the oldest first, of which each has sent that much."""
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for _ in range(count):
            pair = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
            stack.callback(pair[1].close)
            pair[1].write(sent)
            made.append(pair)
        yield made


async def is_let_be(pair):
    """Whether this one is answered once it has asked."""
    reader, writer = pair
    try:
        writer.write(GET[1:])
        return (await reader.read()).endswith(b"hello")
    except ConnectionError:
        return False


async def answered(port, times, source="127.0.0.1"):
    """How many of `times` GETs are answered, each on a connection of its own."""
    found = 0
    for _ in range(times):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
        writer.write(GET)
        with contextlib.suppress(ConnectionResetError):
            found += (await reader.read()).endswith(b"hello")
        writer.close()
    return found


@pytest.mark.parametrize("own", ["127.0.0.1", "127.0.0.2"])
async def test_however_many_connections_stand_idle_who_asks_is_answered(own):
    """The kubelet's probe, from an address of its own, or one that it shares with strangers."""
    async with (
        serving(PAGES) as (port, _),
        connected(port, gate.CONNECTIONS + 44),
        connected(port, 40, "127.0.0.3"),
    ):
        assert 50 == await answered(port, 50, own)


async def test_however_many_addresses_they_come_from_who_asks_is_answered():
    async with serving(PAGES) as (port, _), contextlib.AsyncExitStack() as stack:
        for number in range(gate.CONNECTIONS + 44):
            source = f"127.0.{1 + number // 200}.{1 + number % 200}"
            await stack.enter_async_context(connected(port, 1, source))

        assert 50 == await answered(port, 50, "127.0.1.1")


@pytest.mark.skipif(
    int(Path("/proc/sys/net/core/somaxconn").read_text(encoding="ascii")) < BURST,
    reason="this kernel is set to let fewer connections wait",
)
async def test_a_burst_of_connections_waits_to_be_taken():
    """A handshake that finds no room is begun again after a second, half of a probe's patience."""
    async with serving(PAGES) as (port, _):
        with contextlib.ExitStack() as burst:
            for _ in range(BURST):  # while the loop does not turn
                burst.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.9))


async def test_the_oldest_of_whoever_holds_most_gives_way(monkeypatch):
    monkeypatch.setattr(gate, "CONNECTIONS", 6)
    monkeypatch.setattr(gate, "SHARE", 2)
    async with (
        serving(PAGES) as (port, _),
        connected(port, 2, "127.0.0.2") as modest,
        connected(port, 4, "127.0.0.3") as greedy,
    ):
        assert 1 == await answered(port, 1, "127.0.0.4")

        assert [True, True] == [await is_let_be(one) for one in modest]
        assert [False, True, True, True] == [await is_let_be(one) for one in greedy]


async def test_who_takes_no_answer_gives_way_when_nobody_is_idle(monkeypatch):
    monkeypatch.setattr(gate, "CONNECTIONS", 3)
    large = {**PAGES, "/large": lambda _: web.Response(body=b"x" * 16_000_000)}
    asked = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"
    async with serving(large) as (port, _), connected(port, 3, sent=asked) as lazy:
        for reader, _ in lazy:
            await reader.readexactly(8)

        assert 10 == await answered(port, 10)


async def test_a_storm_is_one_line_a_minute_with_how_many_were_left_out(monkeypatch):
    monkeypatch.setattr(gate, "CONNECTIONS", 2)
    async with serving(PAGES) as (port, _):
        with structlog.testing.capture_logs() as logs:
            async with connected(port, 20) as idle:
                assert [False] * 18 == [await is_let_be(one) for one in idle[:18]]

    assert [("web.full", "127.0.0.1", 0)] == [
        (line["event"], line["peer"], line["more"]) for line in logs
    ]
