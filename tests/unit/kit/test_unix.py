"""Who calls is what the kernel says, and nobody where it says nothing; servers that hang up."""

import asyncio
import os
import socket

import pytest
from grpclib.protocol import H2Protocol

from agent.kubelet.door import peer_uid
from agent.witness import UnixChannel


class Transport:
    """A transport over one socket."""

    def __init__(self, opened: socket.socket | None) -> None:
        self._opened = opened

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self._opened if name == "socket" else None


def test_the_caller_on_a_unix_socket_is_known():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert os.geteuid() == peer_uid(Transport(ours))  # type: ignore[arg-type]


def test_a_caller_over_tcp_or_who_has_gone_is_nobody():
    with socket.socket(socket.AF_INET) as opened:
        assert peer_uid(Transport(opened)) is None  # type: ignore[arg-type]
    assert peer_uid(None) is None
    assert peer_uid(Transport(None)) is None  # type: ignore[arg-type]


class SlowChannel(UnixChannel):
    """The loop comes back to it after everything that lies there was read."""

    async def _create_connection(self) -> H2Protocol:
        protocol = await super()._create_connection()
        await asyncio.sleep(0.05)
        return protocol


@pytest.mark.looptime(False)
async def test_a_server_that_hangs_up_while_the_connection_opens_is_an_os_error(tmp_path):
    path = tmp_path / "s.sock"
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), path)
    async with server, SlowChannel(path=str(path)) as channel:
        with pytest.raises(ConnectionResetError, match="was lost while it was opened"):
            await channel.__connect__()
