"""WebServer through real sockets: methods, headers, limits, and the life of its unix socket."""

import asyncio
import contextlib
import socket
import stat

import aiohttp
import pytest
import structlog

from agent.errors import PermissionFault
from agent.web.server import HEAD_LIMIT, HEADERS, Listeners, near, serve_pages
from tests.doors.web_client import PAGES, ask, raw, serving

pytestmark = pytest.mark.looptime(False)


async def test_a_page_is_served_with_every_protective_header():
    for path, status in (("/hello", 200), ("/none", 404)):
        found = await ask(PAGES, path)

        assert status == found[0]
        assert HEADERS == {name: found[2][name] for name in HEADERS}
        assert "Access-Control-Allow-Origin" not in found[2]


async def test_a_path_that_is_not_there_names_those_that_are():
    status, text, _ = await ask(PAGES, "/x")

    assert (404, "No such page. Pages: /hello /broken\n") == (status, text)


async def test_head_has_the_headers_and_no_body():
    async with serving(PAGES) as (_, client), client.head("/hello") as answer:
        assert (200, "5", b"") == (
            answer.status,
            answer.headers["Content-Length"],
            await answer.read(),
        )


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
async def test_other_methods_are_refused(method):
    async with serving(PAGES) as (_, client), client.request(method, "/hello") as answer:
        assert (405, "GET, HEAD") == (answer.status, answer.headers["Allow"])


async def test_a_page_that_fails_is_a_500_in_general_words_and_one_error_in_the_log():
    with structlog.testing.capture_logs() as logs:
        async with serving(PAGES) as (_, client):
            for _ in range(20):
                async with client.get("/broken") as answer:
                    assert (500, False) == (answer.status, "a bug" in await answer.text())

    failed = [(line["path"], line["more"]) for line in logs if line["event"] == "web.failed"]
    assert [("/broken", 0)] == failed


async def test_a_head_that_is_too_large_is_refused():
    field = {f"X-{n}": "x" * 4000 for n in range(HEAD_LIMIT // 4000 + 1)}

    assert 431 == (await ask(PAGES, "/hello", headers=field))[0]
    assert 400 == (await ask(PAGES, "/hello", headers={"X": "x" * 9000}))[0]
    assert 400 == (await ask(PAGES, "/hello?" + "x" * 5000))[0]


async def test_bytes_that_are_no_http_get_a_400_and_the_end_and_no_log_line(caplog):
    async with serving(PAGES) as (port, _):
        assert (await raw(port, b"\x16\x03\x01 hello\r\n\r\n")).startswith(b"HTTP/1.0 400")

    assert [] == [record for record in caplog.records if record.levelname == "ERROR"]


MARK = b"abracadabra"


@pytest.mark.parametrize(
    ("said", "status"),
    [
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
async def test_whatever_is_said_the_answer_is_short_and_ours_and_repeats_nothing(said, status):
    async with serving(PAGES) as (port, _):
        head, _, body = (await raw(port, said)).partition(b"\r\n\r\n")

    line, *fields = head.decode().split("\r\n")
    headers = dict(field.split(": ", 1) for field in fields)
    assert (True, str(status)) == (line.startswith("HTTP/"), line.split()[1])
    assert HEADERS == {name: headers[name] for name in HEADERS}
    assert (False, True) == (MARK in head + body, len(body) < 100)


async def opened(listeners):
    async with serve_pages(listeners, PAGES):
        pass


async def test_a_port_that_is_taken_is_said():
    async with serving(PAGES) as (port, _):
        with pytest.raises(PermissionFault, match=f"127.0.0.1:{port} cannot be bound"):
            await opened(Listeners("127.0.0.1", port))


async def test_an_ipv6_address_has_brackets_before_its_port():
    # No machine has an address of the documentation's prefix.
    with pytest.raises(PermissionFault, match=r"^\[2001:db8::7\]:9394 cannot be bound"):
        await opened(Listeners("2001:db8::7", 9394))


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
    listeners = Listeners("127.0.0.2", 0, near="127.0.0.1")
    async with serve_pages(listeners, PAGES) as port:
        for host in ("127.0.0.1", "127.0.0.2"):
            async with aiohttp.request("GET", f"http://{host}:{port}/hello") as answer:
                assert "hello" == await answer.text()

    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_second_address_that_is_taken_is_said_and_keeps_nobody_from_the_first():
    async with serving(PAGES) as (other, _):
        taken = other
        with structlog.testing.capture_logs() as logs:
            listeners = Listeners("127.0.0.2", taken, near="127.0.0.1")
            async with serve_pages(listeners, PAGES) as port:
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


async def test_the_unix_socket_is_for_its_group_only(tmp_path):
    path = tmp_path / "run" / "api.sock"
    async with serve_pages(Listeners(port=None, socket_path=path), PAGES) as port:
        assert port is None
        assert "hello" == await over_unix(path)
        assert 0o660 == stat.S_IMODE(path.stat().st_mode)
        assert 0 == stat.S_IMODE(path.parent.stat().st_mode) & 0o027

    assert not path.exists()


async def test_a_socket_of_the_dead_is_replaced(tmp_path):
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async with serve_pages(Listeners(port=None, socket_path=path), PAGES):
        assert "hello" == await over_unix(path)


async def test_a_socket_of_the_living_is_left_alone(tmp_path):
    path = tmp_path / "api.sock"
    async with serve_pages(Listeners(port=None, socket_path=path), PAGES):
        with pytest.raises(PermissionFault, match="served by another process"):
            await opened(Listeners(port=None, socket_path=path))

        assert "hello" == await over_unix(path)


async def test_a_living_socket_with_a_full_queue_is_left_alone(tmp_path):
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as busy, contextlib.ExitStack() as callers:
        busy.bind(str(path))
        busy.listen(0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(8):
                caller = callers.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect(str(path))
        with pytest.raises(PermissionFault, match="served by another process"):
            await opened(Listeners(port=None, socket_path=path))


@pytest.mark.parametrize("kind", ["file", "link"])
async def test_what_is_no_socket_is_not_removed(tmp_path, kind):
    path = tmp_path / "api.sock"
    if kind == "file":
        path.write_text("mine")
    else:
        path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(PermissionFault, match="not a socket"):
        await opened(Listeners(port=None, socket_path=path))

    assert path.is_symlink() or "mine" == path.read_text()


async def test_a_directory_that_cannot_be_used_is_said_and_nothing_stays_bound(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionFault, match=r"api\.sock cannot be bound"):
        await opened(Listeners(port=0, socket_path=tmp_path / "file" / "api.sock"))
    with pytest.raises(PermissionFault, match="AF_UNIX path too long"):
        await opened(Listeners(port=None, socket_path=tmp_path / ("x" * 120)))


async def test_a_socket_that_is_not_ours_any_more_is_not_removed(tmp_path):
    path = tmp_path / "api.sock"
    async with serve_pages(Listeners(port=None, socket_path=path), PAGES):
        path.unlink()
        path.write_text("somebody's")

    assert "somebody's" == path.read_text()
