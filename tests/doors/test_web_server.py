"""The web server through real sockets: methods, headers, probes, limits, and its unix socket."""

import asyncio
import contextlib
import socket
import stat
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import structlog
from aiohttp import web

from agent.errors import PermissionFault
from agent.node import Check
from agent.web import server
from agent.web.server import HEADERS, livez, near, readyz, serve_port, serve_socket
from tests.doors.web_client import GET, PAGES, ask, raw, serving

pytestmark = pytest.mark.looptime(False)
BURST = min(300, int(Path("/proc/sys/net/core/somaxconn").read_text(encoding="ascii")))
MARK = b"abracadabra"
OWN = "127.0.0.1"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However slow the machine, nobody is closed for his time but where that is the claim."""
    monkeypatch.setattr(server, "HEAD_TIMEOUT", 60.0)


# Answers.


async def test_a_page_is_served_with_every_protective_header():
    for path, status in (("/hello", 200), ("/none", 404)):
        found = await ask(PAGES, path)

        assert status == found[0]
        assert HEADERS == {name: found[2][name] for name in HEADERS}
        assert "Access-Control-Allow-Origin" not in found[2]
    assert "No such page. Pages: /hello /broken\n" == found[1]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
async def test_other_methods_are_refused(method):
    async with serving(PAGES) as (_, client):
        async with client.request(method, "/hello") as answer:
            assert (405, "GET, HEAD") == (answer.status, answer.headers["Allow"])
        async with client.head("/hello") as answer:
            length = answer.headers["Content-Length"]
            assert (200, "5", b"") == (answer.status, length, await answer.read())


async def test_a_page_that_fails_is_a_500_in_general_words_and_one_error_in_the_log():
    with structlog.testing.capture_logs() as logs:
        async with serving(PAGES) as (_, client):
            for _ in range(20):
                async with client.get("/broken") as answer:
                    assert (500, False) == (answer.status, "a bug" in await answer.text())

    failed = [(line["path"], line["more"]) for line in logs if line["event"] == "web.failed"]
    assert [("/broken", 0)] == failed


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x16\x03\x01 hello\r\n\r\n", 400),
        (MARK + b" \x1b[2J\r\n\r\n", 400),
        (MARK * 5_000 + b"\r\n\r\n", 400),
        (b"GET /" + MARK * 5_000 + b" HTTP/1.1\r\n\r\n", 400),
        (b"GET http://[::" + MARK + b"/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /hello HTTP/1.7\r\nHost: " + MARK + b"\r\n\r\n", 400),
        (b"GET /hello HTTP/1.1\r\nHost: x\r\nContent-Length: " + MARK + b"\r\n\r\n", 400),
        (b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n" + MARK + b"\r\n\r\n", 400),
        (b"GET /hello\r\n\r\n", 505),
        (b"GET /hello HTTP/0.9\r\n\r\n", 505),
        (b"GET /hello HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"CONNECT " + MARK + b":1 HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n" + MARK, 405),
    ],
)
async def test_whatever_is_said_the_answer_is_short_and_ours_and_repeats_nothing(
    said, status, caplog
):
    async with serving(PAGES) as (port, _):
        head, _, body = (await raw(port, said)).partition(b"\r\n\r\n")

    line, *fields = head.decode().split("\r\n")
    headers = dict(field.split(": ", 1) for field in fields)
    assert (True, str(status)) == (line.startswith("HTTP/"), line.split()[1])
    assert HEADERS == {name: headers[name] for name in HEADERS}
    assert (False, True) == (MARK in head + body, len(body) < 100)
    assert [] == [record for record in caplog.records if record.levelname == "ERROR"]


STATE = Check("state", ok=True)
STREAM = Check("stream", ok=False, text="the kubelet\nhas no list stream open")
API = Check("api", ok=False, text="the pod watch is down", required=False)
STANDBY = Check("instance", ok=False, text="standby: another agent runs")
FAILED = "[+]state ok\n[-]stream failed: the kubelet has no list stream open\nreadyz check failed\n"
DEGRADED = "[!]api degraded: the pod watch is down\n"
STANDS_BY = "[!]instance degraded: standby: another agent runs\n"


@pytest.mark.parametrize(
    ("path", "checks", "status", "text"),
    [
        ("/livez", [STREAM], 200, "ok"),
        ("/healthz", [STREAM], 200, "ok"),
        ("/livez?verbose", [STREAM], 200, "[+]loop ok\nlivez check passed\n"),
        ("/readyz", [STATE], 200, "ok"),
        ("/readyz?verbose", [STATE], 200, "[+]state ok\nreadyz check passed\n"),
        ("/readyz", [STATE, STREAM], 503, FAILED),
        ("/readyz?verbose=1", [STATE, STREAM], 503, FAILED),
        ("/readyz", [STATE, API], 200, f"ok\n{DEGRADED}"),
        (*("/readyz?verbose", [STATE, API], 200), f"[+]state ok\n{DEGRADED}readyz check passed\n"),
        ("/readyz?standby", [STANDBY], 200, f"ok\n{STANDS_BY}"),
        ("/readyz?standby&verbose", [STANDBY], 200, f"{STANDS_BY}readyz check passed\n"),
        (
            *("/readyz", [STANDBY], 503),
            "[-]instance failed: standby: another agent runs\nreadyz check failed\n",
        ),
        (
            *("/readyz?standby", [STANDBY, STREAM], 503),
            f"{STANDS_BY}{FAILED.removeprefix('[+]state ok' + chr(10))}",
        ),
        (
            *("/readyz", [Check("server", ok=False)], 503),
            "[-]server failed: no reason given\nreadyz check failed\n",
        ),
    ],
)
async def test_probes_say_what_the_api_servers_say(path, checks, status, text):
    found = partial(readyz, lambda: tuple(checks))
    pages = {"/livez": livez, "/healthz": livez, "/readyz": found}

    assert (status, text) == (await ask(pages, path))[:2]


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("HA-4002", 200, "HA-4002 "),
        ("H-079", 200, "H-079 XID 79: the GPU has fallen off the bus"),
        ("HA-9999", 404, "the runbook has no entry HA-9999"),
        ("", 404, "no entry ;"),
        ("a%1b/b", 404, "no entry a\ufffd/b"),
        ("x" * 2000, 404, "lists all"),
    ],
)
async def test_an_id_is_answered_with_its_text_of_the_runbook(name, status, said):
    found, text, _ = await ask({server.RUNBOOK: server.runbook_page}, f"/runbook/{name}")

    assert (status, True) == (found, said in text)


# Connections.


HEADS = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 8000) for number in range(100))


@pytest.mark.parametrize("head", [GET[:-2] + HEADS + b"\r\n", GET[:-2] + b"X-Slow: "])
async def test_a_head_that_is_far_too_long_or_does_not_end_is_closed(monkeypatch, head):
    monkeypatch.setattr(server, "HEAD_TIMEOUT", 0.05 if len(head) < 1000 else 0.5)
    async with serving(PAGES) as (port, _):
        with contextlib.suppress(ConnectionError):
            assert b"" == await raw(port, head)


async def test_a_client_that_takes_no_answer_is_closed(monkeypatch):
    monkeypatch.setattr(server, "ANSWER_TIMEOUT", 0.05)
    closed, close = asyncio.Event(), server.ConnectionGate._close

    def tell(*args):
        closed.set()
        return close(*args)

    monkeypatch.setattr(server.ConnectionGate, "_close", tell)
    pages = {"/large": lambda _: web.Response(body=b"x" * 64_000_000)}
    async with serving(pages) as (port, _):
        with socket.socket() as lazy:
            lazy.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(lazy, ("127.0.0.1", port))
            await loop.sock_sendall(lazy, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            await closed.wait()
            received = bytearray()
            while chunk := await loop.sock_recv(lazy, 1 << 20):
                received += chunk

    assert received.startswith(b"HTTP/1.1 200")
    assert len(received) < 64_000_000


@contextlib.asynccontextmanager
async def connected(port, sources, sent=GET[:1]):
    """A connection from each of these addresses, the oldest first, which has sent that much."""
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for source in sources:
            pair = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
            stack.callback(pair[1].close)
            pair[1].write(sent)
            made.append(pair)
        yield made


async def is_answered(pair, sent=GET[1:]):
    """Whether this connection is answered once it has asked."""
    reader, writer = pair
    try:
        writer.write(sent)
        return (await reader.read()).endswith(b"hello")
    except ConnectionError:
        return False


async def answered(port, times, source=OWN):
    """How many of `times` GETs are answered, each on a connection of its own."""
    found = 0
    for _ in range(times):
        async with connected(port, [source], b"") as (pair,):
            found += await is_answered(pair, GET)
    return found


FULL = server.CONNECTIONS + 44
STRANGERS = [OWN] * FULL + ["127.0.0.3"] * 40
MANY = [f"127.0.{1 + number // 200}.{1 + number % 200}" for number in range(FULL)]


@pytest.mark.parametrize(
    ("idle", "own"),
    [(STRANGERS, OWN), (STRANGERS, "127.0.0.2"), (MANY, "127.0.1.1")],
    ids=["from its own address", "from others", "from many addresses"],
)
async def test_however_many_connections_stand_idle_who_asks_is_answered(idle, own):
    """As the kubelet's probe, from an address of its own, or one that it shares with strangers."""
    async with serving(PAGES) as (port, _), connected(port, idle):
        assert 20 == await answered(port, 20, own)


async def test_a_burst_of_connections_waits_to_be_taken():
    """A handshake that finds no room is begun again after a second, half of a probe's patience."""
    async with serving(PAGES) as (port, _):
        with contextlib.ExitStack() as burst:
            for _ in range(BURST):  # while the loop does not turn
                burst.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.9))


async def test_the_oldest_of_whoever_holds_most_gives_way(monkeypatch):
    monkeypatch.setattr(server, "CONNECTIONS", 6)
    monkeypatch.setattr(server, "SHARE", 2)
    async with (
        serving(PAGES) as (port, _),
        connected(port, ["127.0.0.2"] * 2) as modest,
        connected(port, ["127.0.0.3"] * 4) as greedy,
    ):
        assert 1 == await answered(port, 1, "127.0.0.4")

        assert [True, True] == [await is_answered(one) for one in modest]
        assert [False, True, True, True] == [await is_answered(one) for one in greedy]


async def test_who_takes_no_answer_gives_way_when_nobody_is_idle(monkeypatch):
    monkeypatch.setattr(server, "CONNECTIONS", 3)
    large = {**PAGES, "/large": lambda _: web.Response(body=b"x" * 16_000_000)}
    asked = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"
    async with serving(large) as (port, _), connected(port, [OWN] * 3, asked) as lazy:
        for reader, _ in lazy:
            await reader.readexactly(8)

        assert 10 == await answered(port, 10)


async def test_a_storm_is_one_line_a_minute_with_how_many_were_left_out(monkeypatch):
    monkeypatch.setattr(server, "CONNECTIONS", 2)
    async with serving(PAGES) as (port, _):
        with structlog.testing.capture_logs() as logs:
            async with connected(port, [OWN] * 20) as idle:
                assert [False] * 18 == [await is_answered(one) for one in idle[:18]]

    assert [("web.full", "127.0.0.1", 0)] == [
        (line["event"], line["peer"], line["more"]) for line in logs
    ]


# Where it listens.


def at_socket(path):
    return serve_socket(PAGES, path)


async def refusal(opened):
    """Why it cannot listen."""
    with pytest.raises(PermissionFault) as error:
        async with opened:
            pass
    return str(error.value)


async def test_an_address_that_cannot_be_bound_is_said():
    async with serving(PAGES) as (port, _):
        said = await refusal(serve_port(PAGES, "127.0.0.1", port))
        assert f"127.0.0.1:{port} cannot be bound" in said

    # No machine has an address of the documentation's prefix.
    said = await refusal(serve_port(PAGES, "2001:db8::7", 9394))
    assert said.startswith("[2001:db8::7]:9394 cannot be bound")


@pytest.mark.parametrize(
    ("host", "second"),
    [
        ("10.1.2.3", "127.0.0.1"),
        ("fd00::7", "127.0.0.1"),
        ("127.0.0.1", ""),
        ("::1", ""),
        ("0.0.0.0", ""),  # noqa: S104 -- nothing is bound
        ("::", ""),
        ("localhost", ""),
    ],
)
def test_on_an_address_of_a_pod_the_port_is_on_loopback_too(host, second):
    assert second == near(host)


async def test_the_second_address_has_the_same_port_and_is_closed_with_the_first():
    async with serve_port(PAGES, "127.0.0.2", 0, "127.0.0.1") as port:
        for host in ("127.0.0.1", "127.0.0.2"):
            async with aiohttp.request("GET", f"http://{host}:{port}/hello") as answer:
                assert "hello" == await answer.text()

    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_second_address_that_is_taken_is_said_and_keeps_nobody_from_the_first():
    async with serving(PAGES) as (taken, _):
        with structlog.testing.capture_logs() as logs:
            async with serve_port(PAGES, "127.0.0.2", taken, "127.0.0.1") as port:
                address = f"http://127.0.0.2:{port}/hello"
                async with aiohttp.request("GET", address) as answer:
                    assert 200 == answer.status

    (said,) = [line["text"] for line in logs if line["event"] == "web.not_near"]
    assert said.startswith(f"127.0.0.1:{taken} cannot be bound")


async def over_unix(path):
    connector = aiohttp.UnixConnector(str(path))
    async with (
        aiohttp.ClientSession("http://agent", connector=connector) as client,
        client.get("/hello") as answer,
    ):
        return await answer.text()


async def test_the_unix_socket_is_for_its_group_only_and_is_removed_at_the_end(tmp_path):
    path = tmp_path / "run" / "api.sock"
    async with at_socket(path) as port:
        assert (None, "hello") == (port, await over_unix(path))
        assert 0o660 == stat.S_IMODE(path.stat().st_mode)
        assert 0 == stat.S_IMODE(path.parent.stat().st_mode) & 0o027

    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with at_socket(path):
        assert "hello" == await over_unix(path)
        path.unlink()
        path.write_text("somebody's")

    assert "somebody's" == path.read_text()


async def test_however_many_connections_fill_the_unix_socket_root_is_answered(tmp_path):
    path = tmp_path / "api.sock"
    async with at_socket(path), contextlib.AsyncExitStack() as stack:
        for _ in range(FULL):
            _, writer = await asyncio.open_unix_connection(str(path))
            stack.callback(writer.close)
            writer.write(GET[:1])

        assert ["hello"] * 9 == [await over_unix(path) for _ in range(9)]


async def test_what_is_no_socket_is_not_removed_and_what_cannot_be_bound_is_said(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("mine")
    link.symlink_to(tmp_path / "elsewhere")
    for path in (file, link):
        assert "remove a file that is in its place" in await refusal(at_socket(path))
    assert (True, "mine") == (link.is_symlink(), file.read_text())

    assert "api.sock cannot be bound" in await refusal(at_socket(file / "api.sock"))
    assert "AF_UNIX path too long" in await refusal(at_socket(tmp_path / ("x" * 120)))
