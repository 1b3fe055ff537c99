"""One gRPC call, frame by frame: a peer that may break every rule of gRPC, but none of HTTP/2."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived

STREAM = 1


class RawCall:
    """What came back: `body` as it stands, `headers` with the trailers, `ended` after the last."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._h2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self.body = b""
        self.headers: dict[str, str] = {}
        self.ended = False

    async def request(self, path: str, body: bytes, *, end: bool = True) -> None:
        self._h2.initiate_connection()
        self._h2.send_headers(
            STREAM,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", "localhost"),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("grpc-accept-encoding", "gzip"),
            ],
        )
        self._h2.send_data(STREAM, body, end_stream=end)
        await self._flush()

    async def read(self, *, acknowledge: bool = True) -> None:
        """Take what comes next. Without acknowledging, the sender's window stays as it is."""
        data = await self._reader.read(65_536)
        self.ended = self.ended or not data
        for event in self._h2.receive_data(data):
            match event:
                case DataReceived():
                    self.body += event.data
                    if acknowledge:
                        self._h2.acknowledge_received_data(event.flow_controlled_length, STREAM)
                case ResponseReceived() | TrailersReceived():
                    self.headers |= {str(name): str(value) for name, value in event.headers}
                case StreamEnded() | StreamReset():
                    self.ended = True
                case _:
                    pass  # settings and windows
        await self._flush()

    async def open_windows(self, size: int) -> None:
        """Allow the sender `size` bytes more."""
        self._h2.increment_flow_control_window(size)
        self._h2.increment_flow_control_window(size, STREAM)
        await self._flush()

    async def until_ended(self) -> None:
        while not self.ended:
            await self.read()

    async def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())
        await self._writer.drain()


@contextlib.asynccontextmanager
async def a_raw_call(socket: Path) -> AsyncIterator[RawCall]:
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        yield RawCall(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()


def prefixed(message: bytes, *, flag: int = 0, claim: int | None = None) -> bytes:
    """A gRPC message; `claim` states another length than the true one."""
    return bytes([flag]) + (len(message) if claim is None else claim).to_bytes(4) + message


def messages(body: bytes) -> list[tuple[int, bytes]]:
    """Flag and content of each message in `body`; a cut one at the end is left out."""
    found = []
    while len(body) >= 5 and len(body) >= 5 + (size := int.from_bytes(body[1:5])):
        found.append((body[0], body[5 : 5 + size]))
        body = body[5 + size :]
    return found
