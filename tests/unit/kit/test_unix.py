"""Who calls is what the kernel says, and nobody where it says nothing."""

import os
import socket

from agent.kit.unix import peer_uid


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
