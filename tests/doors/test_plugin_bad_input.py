"""The kubelet's door opens to the kubelet alone, and a peer that floods it keeps nobody out."""

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection

from tests.fakes.door import a_door
from tests.fakes.grpc_messages import GrpcPlugin
from tests.fakes.raw_h2 import a_raw_call, prefixed

pytestmark = pytest.mark.looptime(False)

NOBODY = 65534
PATIENCE = 10.0
ALLOCATE = "/v1beta1.DevicePlugin/Allocate"
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", ALLOCATE),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
CALL = """
import os, socket, sys
os.setresuid(*3 * [int(sys.argv[2])])
with socket.socket(socket.AF_UNIX) as caller:
    caller.settimeout(30)
    caller.connect(sys.argv[1])
    try:
        settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
        caller.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + settings)
        while told := caller.recv(4096):
            print("told", told)
    except ConnectionError:
        pass
    print("hung up")
"""


@pytest.fixture
def passable() -> Iterator[Path]:
    """A directory that everybody may pass through, as no test's own is."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o711)
        yield Path(made)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can call as somebody else")
async def test_another_user_is_hung_up_on_whatever_the_mode_of_the_socket(passable):
    async with a_door(passable) as door:
        door.path.chmod(0o666)

        done = await asyncio.to_thread(
            subprocess.run,
            # Nobody could write what a measurement of coverage, which comes with site, has found.
            [sys.executable, "-S", "-c", CALL, str(door.path), str(NOBODY)],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

        assert ("hung up\n", "") == (done.stdout, done.stderr)
        assert [] == door.allocator.asked
        await is_served(door.path)


async def test_a_flood_of_calls_that_are_reset_at_once_keeps_nobody_out(tmp_path):
    """The pattern of CVE-2023-44487, on several connections."""
    connection = H2Connection(H2Configuration())
    connection.initiate_connection()
    for number in range(300):
        connection.send_headers(2 * number + 1, HEADERS)
        connection.reset_stream(2 * number + 1)
    connection.ping(b"are you?")
    sent = connection.data_to_send()
    async with a_door(tmp_path) as door:
        for _ in range(2):
            reader, writer = await asyncio.open_unix_connection(str(door.path))
            writer.write(sent)
            async with asyncio.timeout(PATIENCE):
                while b"are you?" not in await reader.read(65_536):
                    pass
            writer.close()

        await is_served(door.path)


async def test_a_peer_that_dies_in_a_call_leaves_no_error_behind(tmp_path):
    """As a kubelet that is killed while it takes our lists."""
    heard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, said: heard.append(said))
    async with a_door(tmp_path) as door:
        for _ in range(3):
            async with a_raw_call(door.path) as call:
                await call.request("/v1beta1.DevicePlugin/ListAndWatch", prefixed(b""))
                while not call.body:
                    await call.read()
            async with asyncio.timeout(PATIENCE):
                await door.server.streams.until(lambda count: count == 0)
        gc.collect()
        await asyncio.sleep(0)

    assert [] == heard


async def test_bytes_that_are_no_http_2_end_that_connection_alone(tmp_path):
    async with a_door(tmp_path) as door:
        for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, prefixed(b"x" * 9)):
            await hung_up(door.path, noise)

        await is_served(door.path)


async def hung_up(path: Path, sent: bytes = b"") -> None:
    """Wait until the agent has closed a connection on which this was sent."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(sent)
    async with asyncio.timeout(PATIENCE):
        while await reader.read(4096):
            pass
    writer.close()


async def is_served(path: Path) -> None:
    """The kubelet's own calls are answered."""
    plugin = GrpcPlugin(path)
    answer = await asyncio.to_thread(plugin.allocate, ["a"])
    assert 1 == len(answer.container_responses)
    plugin.close()
