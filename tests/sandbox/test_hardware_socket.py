"""The control socket: bounded, clear, and never held up by a hung driver."""

import asyncio
import json
import select
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.errors import DriverError, DriverMissing, PermissionFault, SettingsError
from agent.model import EventKind, ProbeOutcome
from agent.sandbox import hardware_talk as talk
from agent.sandbox.driver import SimulatedDriver, open_simulation
from agent.sandbox.hardware_talk import HardwareSilent, ask

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
        ('{"verb":"explode"}\n', "Invalid value 'explode'"),
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

    assert ("failed", "malformed") == (reply["reply"], reply["reason"])
    assert words in reply["text"]
    assert ["ok", "ok"] == [gpu["state"] for gpu in again["gpus"]]


async def test_an_endless_line_is_refused_and_the_connection_closed(driver, path):
    async with raw(path) as peer:
        reply = await peer.say(b"x" * (talk.REQUEST_LIMIT * 3))
        rest = await peer.reader.read()

    assert "longer than 4096 bytes" in reply["text"]
    assert b"" == rest


async def test_events_reach_every_listener(driver, path):
    other = SimulatedDriver(path)
    streams = [driver.events(), other.events()]
    async with asyncio.TaskGroup() as tasks:
        heard = [tasks.create_task(first(stream)) for stream in streams]
        while not all(task.done() for task in heard):
            await ask(path, talk.XidRequest(gpu="0", xid=94))
            await asyncio.wait(heard, timeout=0.02)

    assert [(EventKind.XID, 94)] * 2 == [(t.result().kind, t.result().xid) for t in heard]
    for stream in streams:
        await stream.aclose()


async def test_a_listener_that_dies_with_news_unread_ends_nobody_elses_simulation(path):
    """As an agent that is killed, or ends at once for its settings."""
    async with open_simulation("t4", socket_path=path):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.connect(str(path))
            listener.sendall(b'{"verb":"events"}\n')
            await asyncio.to_thread(select.select, [listener], [], [])
        for _ in range(20):
            assert isinstance(await ask(path, talk.ListRequest()), talk.DoneReply)


async def test_a_stream_ends_with_its_session(driver):
    opened = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        heard = tasks.create_task(_error_of(first(driver.events(opened.set))))
        await opened.wait()
        await driver.close()

    assert isinstance(heard.result(), DriverError)


async def _error_of(awaitable) -> Exception | None:
    try:
        await awaitable
    except DriverError as error:
        return error
    return None


async def test_hardware_that_is_not_there_is_a_missing_driver(path):
    driver = SimulatedDriver(path)

    with pytest.raises(DriverMissing, match="no simulated hardware answers at"):
        await driver.scan()
    with pytest.raises(DriverError, match="no simulated hardware answers at"):
        await first(driver.events())


async def test_a_hung_driver_answers_the_driver_nothing_and_people_everything(driver, path):
    await ask(path, talk.HangRequest(seconds=0.4))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await driver.scan()
    shown = await ask(path, talk.ListRequest())
    scan = await driver.scan()

    assert isinstance(shown, talk.DoneReply)
    assert 2 == len(shown.gpus) == len(scan.gpus)


async def test_a_request_sent_early_is_answered_after_the_hang(driver, path):
    await ask(path, talk.HangRequest(seconds=0.2))
    async with raw(path) as peer:
        scan = await peer.say('{"verb":"scan"}\n{"verb":"list"}\n')
        shown = json.loads(await peer.reader.readline())

    assert ("scan", "done") == (scan["reply"], shown["reply"])


async def test_hardware_that_lives_elsewhere_outlives_the_agent(driver, path):
    uuid = (await driver.scan()).gpus[0].uuid
    async with open_simulation(f"unix:{path}", socket_path=path / "unused") as one:
        await ask(path, talk.XidRequest(gpu="0", xid=79))
        assert ProbeOutcome.LOST is (await one.probe(uuid)).outcome
    async with open_simulation(f"unix:{path}", socket_path=path / "unused") as another:
        assert ProbeOutcome.LOST is (await another.probe(uuid)).outcome


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


async def test_a_socket_that_cannot_be_made_says_why(tmp_path):
    with pytest.raises(PermissionFault, match="control socket cannot be created"):
        async with open_simulation("t4", socket_path=tmp_path / "no" / "dir.sock"):
            pass


async def test_a_spec_that_cannot_be_used_starts_nothing(path):
    with pytest.raises(SettingsError):
        async with open_simulation("voodoo:2", socket_path=path):
            pass

    assert not path.exists()


async def test_the_callers_own_exception_comes_out_as_it_is(path):
    with pytest.raises(KeyError):
        async with open_simulation("t4", socket_path=path):
            raise KeyError("mine")


@pytest.mark.parametrize("answer", [b"", b"half", b"nonsense\n", b'{"reply":"done","text":"x"}\n'])
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
            await ask(path, talk.ListRequest())
    server.close()
