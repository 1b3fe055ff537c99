"""The control socket: bounded, clear, and never held up by a hung driver."""

import asyncio
import select
import socket
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from agent.errors import DriverError, DriverMissing, PermissionFault
from agent.sandbox.driver import SimulatedDriver, open_simulation
from agent.sandbox.hardware_talk import HardwareRequest, ask

pytestmark = pytest.mark.looptime(False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "simulate.sock"


@pytest.fixture
async def driver(path: Path):
    async with open_simulation("h100:2", socket_path=path) as driver:
        yield driver


async def say(path: Path, text: str | bytes) -> dict:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
        session.post("http://gpus/", data=text) as answer,
    ):
        return await answer.json(content_type=None)


async def first(events):
    """The next event of a stream."""
    async with asyncio.timeout(30):
        return await anext(events)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("junk", "JSON is malformed"),
        ("[]", "Expected `object`"),
        ('{"verb":"explode"}', "Invalid enum value 'explode'"),
        ('{"verb":"xid","gpu":"0","xid":0}', ">= 1"),
        ('{"verb":"xid","gpu":"0","xid":"79"}', "Expected `int`"),
        ('{"verb":"lose","gpu":"0","hard":true}', "unknown field `hard`"),
        ('{"verb":"hang","seconds":-1}', "> 0.0"),
        (b"\xff\xfe", "malformed"),
    ],
)
async def test_a_malformed_request_gets_one_clear_error(driver, path, line, words):
    reply, again = await say(path, line), await say(path, '{"verb":"list"}')

    assert "malformed" == reply["failed"]
    assert words in reply["text"]
    assert ["ok", "ok"] == [gpu["state"] for gpu in again["gpus"]]


async def test_a_listener_that_dies_with_news_unread_ends_nobody_elses_simulation(path):
    """As an agent that is killed, or ends at once for its settings."""
    async with open_simulation("t4", socket_path=path):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.connect(str(path))
            listener.sendall(b'POST / HTTP/1.1\r\nContent-Length: 17\r\n\r\n{"verb":"events"}')
            await asyncio.to_thread(select.select, [listener], [], [])
        for _ in range(20):
            assert "1 GPUs" == (await ask(path, HardwareRequest("list"))).text


async def test_the_end_of_a_session_ends_its_stream_of_events(driver):
    opened = asyncio.Event()

    async def close() -> None:
        await opened.wait()
        await driver.close()

    async with asyncio.TaskGroup() as group:
        group.create_task(close())
        with pytest.raises(DriverError, match="the driver session was closed"):
            await first(driver.events(opened.set))


async def test_hardware_that_is_not_there_is_a_missing_driver(path):
    driver = SimulatedDriver(path)

    with pytest.raises(DriverMissing, match="no simulated hardware answers at"):
        await driver.scan()
    with pytest.raises(DriverError, match="no simulated hardware answers at"):
        await first(driver.events())


async def test_a_second_simulation_does_not_take_the_socket_but_a_left_over_one_is_replaced(path):
    async with open_simulation("t4", socket_path=path):
        assert 0o600 == path.stat().st_mode & 0o777
        with pytest.raises(PermissionFault, match="another simulation"):
            async with open_simulation("t4", socket_path=path):
                pass
        assert path.is_socket()
    assert not path.exists()
    server = await asyncio.start_unix_server(lambda *_: None, path)
    server.close()
    async with open_simulation("t4", socket_path=path) as driver:
        assert 1 == len((await driver.scan()).gpus)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s"


@pytest.mark.parametrize(
    "answer",
    [b"", b"half", *(OK % (len(body), body) for body in (b"", b"half", b"nonsense\n", b"{}\n"))],
)
async def test_a_peer_that_is_no_hardware_is_told_apart(path, answer):
    async def babble(reader, writer) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_unix_server(babble, path)
    with pytest.raises(DriverError):
        await SimulatedDriver(path).scan()
    with pytest.raises(DriverError):
        await first(SimulatedDriver(path).events())
    with pytest.raises(DriverError):
        await ask(path, HardwareRequest("list"))
    server.close()


async def test_a_reply_to_another_request_is_refused(path):
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=b'{"text":"x"}\n')

    server = web.Server(answer)
    listener = await asyncio.get_running_loop().create_unix_server(server, path)
    with pytest.raises(DriverError, match="answered another request"):
        await SimulatedDriver(path).scan()
    with pytest.raises(DriverError, match="answered another request"):
        await first(SimulatedDriver(path).events())
    listener.close()
    await server.shutdown(1)
