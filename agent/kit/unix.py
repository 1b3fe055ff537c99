"""Connections over unix sockets: which user opened one, and a channel whose server may end."""

import asyncio
import socket
import struct

from grpclib.client import Channel
from grpclib.protocol import H2Protocol
from typing_extensions import override

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


class UnixChannel(Channel):
    """A Channel that raises an OSError when its connection is lost while it opens.

    grpclib would use the lost connection and raise AttributeError.
    """

    @override
    async def __connect__(self) -> H2Protocol:
        """Return the open connection, or open one. Raises OSError."""
        protocol = await super().__connect__()
        if not self._connected:
            raise ConnectionResetError("the connection was lost while it was opened")
        return protocol
