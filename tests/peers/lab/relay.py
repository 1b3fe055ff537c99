"""The API server at an address of the pods' network: what kube-proxy does for the first Service.

    python -m tests.peers.lab.relay ADDRESS PORT

listens on port 443 of ADDRESS, which need not be there yet, and brings every connection to PORT of
the loopback interface.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Final

HTTPS: Final = 443
_FREEBIND: Final = 15
"""IP_FREEBIND of Linux: the address comes with the first pod."""
_CHUNK: Final = 1 << 16

Taker = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def relay(address: str, port: int) -> None:
    """Take connections until the process ends. Raises OSError: the address is taken."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_IP, _FREEBIND, 1)
    listening.bind((address, HTTPS))
    async with await asyncio.start_server(_to(port), sock=listening) as server:
        await server.serve_forever()


def _to(port: int) -> Taker:
    async def take(inwards: asyncio.StreamReader, outwards: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(inwards, writer))
                group.create_task(_pump(reader, outwards))
        outwards.close()

    return take


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One direction, to its end, which is the other side's end too."""
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(relay(sys.argv[1], int(sys.argv[2])))
