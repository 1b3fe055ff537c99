"""The kubelet's door opens to the kubelet alone, and a peer that floods it keeps nobody out."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection

from agent.plugin import listener
from tests.fakes.door import a_door
from tests.fakes.grpc_messages import Plugin
from tests.fakes.raw_h2 import prefixed

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
    caller.settimeout(5)
    caller.connect(sys.argv[1])
    try:
        settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
        caller.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + settings)
        while caller.recv(4096):
            pass
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
async def test_another_user_is_hung_up_on_whatever_the_mode_of_the_socket(passable: Path):
    async with a_door(passable) as door:
        door.path.chmod(0o666)

        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", CALL, str(door.path), str(NOBODY)],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

        assert ("hung up\n", "") == (done.stdout, done.stderr)
        assert [] == door.allocator.asked
        await is_served(door.path)


async def test_a_caller_who_is_not_root_gets_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with a_door(tmp_path) as door:
        with monkeypatch.context() as patched:
            patched.setattr(listener, "peer_uid", lambda _: os.geteuid() + 1)
            reader, writer = await asyncio.open_unix_connection(str(door.path))
            async with asyncio.timeout(PATIENCE):
                while await reader.read(4096):
                    pass
            writer.close()
        await is_served(door.path)


async def test_a_flood_of_calls_that_are_reset_at_once_keeps_nobody_out(tmp_path: Path):
    """The pattern of CVE-2023-44487, on several connections."""
    async with a_door(tmp_path) as door:
        for _ in range(4):
            await flood(door.path, calls=500)

        await is_served(door.path)


async def flood(path: Path, calls: int) -> None:
    """Begin calls and reset each at once, as fast as the server reads."""
    connection = H2Connection(H2Configuration())
    connection.initiate_connection()
    reader, writer = await asyncio.open_unix_connection(str(path))
    for number in range(calls):
        stream = 2 * number + 1
        connection.send_headers(stream, HEADERS)
        connection.reset_stream(stream)
        writer.write(connection.data_to_send())
    async with asyncio.timeout(PATIENCE):
        await writer.drain()
        assert await reader.read(65_536)
    writer.close()


async def test_bytes_that_are_no_http_2_end_that_connection_alone(tmp_path: Path):
    async with a_door(tmp_path) as door:
        for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, prefixed(b"x" * 9)):
            reader, writer = await asyncio.open_unix_connection(str(door.path))
            writer.write(noise)
            async with asyncio.timeout(PATIENCE):
                while await reader.read(4096):
                    pass
            writer.close()

        await is_served(door.path)


async def is_served(path: Path) -> None:
    """The kubelet's own calls are answered."""
    plugin = Plugin(path)
    answer = await asyncio.to_thread(plugin.allocate, ["a"])
    assert 1 == len(answer.container_responses)
    plugin.close()
