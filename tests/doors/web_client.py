"""A web server on real sockets, and clients for it."""

import asyncio
import contextlib

import aiohttp
from aiohttp import web

from agent.web.server import serve_port


def hello(_request):
    return web.Response(text="hello")


def broken(_request):
    raise ValueError("a bug")


GET = b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"

PAGES = {"/hello": hello, "/broken": broken}


@contextlib.asynccontextmanager
async def serving(pages):
    """The port and an HTTP client that asks its TCP listener."""
    async with (
        serve_port(pages, "127.0.0.1", 0) as found,
        aiohttp.ClientSession(f"http://127.0.0.1:{found}") as client,
    ):
        yield found, client


@contextlib.asynccontextmanager
async def client_of(pages):
    """A client of the port of these pages."""
    async with serving(pages) as (_, client):
        yield client


class FakePeer:
    """A GET from an address."""

    def __init__(self, peer, path="/api/v1/status", host="10.0.0.7:9394"):
        self.path = path
        self.headers = {"Host": host}
        self.transport = self
        self._peer = peer

    def get_extra_info(self, name):
        return self._peer if name == "peername" else None


async def ask(pages, path, **options):
    """One GET of one page: status, text, headers."""
    async with serving(pages) as (_, client), client.get(path, **options) as answer:
        return answer.status, await answer.text(), answer.headers


async def raw(port, request):
    """What the server sends in answer to these bytes, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()
