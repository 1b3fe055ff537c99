"""Asks the kernel which user opened a connection."""

import asyncio
import socket
import struct

_CREDENTIALS = struct.Struct("3i")
"""struct ucred of Linux: process, user, group."""


def peer_uid(transport: asyncio.BaseTransport | None) -> int | None:
    """The user id that opened a unix socket connection; None for another kind, or no transport."""
    opened = None if transport is None else transport.get_extra_info("socket")
    if opened is None or opened.family != socket.AF_UNIX:
        return None
    _, uid, _ = _CREDENTIALS.unpack(
        opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(uid)
