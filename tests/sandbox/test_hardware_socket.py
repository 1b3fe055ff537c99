"""The control socket: bounded, clear, and never held up by a hung driver."""

import asyncio
import json
import select
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.errors import DriverError, DriverMissing, PermissionFault
from agent.sandbox.driver import SimulatedDriver, open_simulation
from agent.sandbox.hardware_talk import HardwareRequest, HardwareSilent, ask

pytestmark = pytest.mark.looptime(False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "simulate.sock"


@pytest.fixture
async def driver(path: Path):
    async with open_simulation("h100:2", socket_path=path) as driver:
        yield driver


class RawHardwareClient:
    """A connection that may say anything."""

    def __init__(self, reader, writer) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, text: str | bytes) -> dict:
        self.writer.write(text if isinstance(text, bytes) else text.encode())
        return json.loads(await self.reader.readline())


@asynccontextmanager
async def raw(path: Path):
    reader, writer = await asyncio.open_unix_connection(path)
    yield RawHardwareClient(reader, writer)
    writer.close()


async def first(events):
    """The next event of a stream."""
    async with asyncio.timeout(30):
        return await anext(events)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("junk\n", "JSON is malformed"),
        ("[]\n", "Expected `object`"),
        ('{"verb":"explode"}\n', "Invalid enum value 'explode'"),
        ('{"verb":"xid","gpu":"0"}\n', "missing required field `xid`"),
        ('{"verb":"xid","gpu":"0","xid":0}\n', ">= 1"),
        ('{"verb":"xid","gpu":"0","xid":"79"}\n', "Expected `int`"),
        ('{"verb":"lose","gpu":"0","hard":true}\n', "unknown field `hard`"),
        ('{"verb":"hang","seconds":-1}\n', "> 0.0"),
        (b"\xff\xfe\n", "malformed"),
    ],
)
async def test_a_malformed_line_gets_one_clear_error_and_the_connection_stays(
    driver, path, line, words
):
    async with raw(path) as peer:
        reply = await peer.say(line)
        again = await peer.say('{"verb":"list"}\n')

    assert "malformed" == reply["failed"]
    assert words in reply["text"]
    assert ["ok", "ok"] == [gpu["state"] for gpu in again["gpus"]]


async def test_a_listener_that_dies_with_news_unread_ends_nobody_elses_simulation(path):
    """As an agent that is killed, or ends at once for its settings."""
    async with open_simulation("t4", socket_path=path):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.connect(str(path))
            listener.sendall(b'{"verb":"events"}\n')
            await asyncio.to_thread(select.select, [listener], [], [])
        for _ in range(20):
            assert "1 GPUs" == (await ask(path, HardwareRequest("list"))).text


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


@pytest.mark.parametrize("answer", [b"", b"half", b"nonsense\n", b'{"text":"x"}\n'])
async def test_a_peer_that_is_no_hardware_is_told_apart(path, answer):
    async def babble(reader, writer) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    server = await asyncio.start_unix_server(babble, path)
    with pytest.raises(DriverError):
        await SimulatedDriver(path).scan()
    with pytest.raises(DriverError):
        await first(SimulatedDriver(path).events())
    if not answer.endswith(b'"}\n'):
        with pytest.raises(HardwareSilent):
            await ask(path, HardwareRequest("list"))
    server.close()
