"""`python -m tests.bench.reader SOCKET`: a second list stream, in a process of its own.

Says on standard output when each list had come (CLOCK_MONOTONIC, which all processes of one machine
share). It decodes nothing, so that what is measured is the
agent and not the peer.
"""

import asyncio
import sys

from grpclib.client import Channel
from grpclib.const import Cardinality
from grpclib.encoding.base import CodecBase


class Raw(CodecBase):
    """Messages as they are."""

    __content_subtype__ = "proto"

    def encode(self, message, message_type):
        return message

    def decode(self, data, message_type):
        return data


async def main(path: str) -> None:
    channel = Channel(path=path, codec=Raw())
    name = "/v1beta1.DevicePlugin/ListAndWatch"
    loop = asyncio.get_running_loop()
    async with channel, channel.request(name, Cardinality.UNARY_STREAM, bytes, bytes) as stream:
        await stream.send_message(b"", end=True)
        async for _ in stream:
            sys.stdout.write(f"{loop.time()!r}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
