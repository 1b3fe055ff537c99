"""An HTTP server whose every answer a test writes, for what no honest API server would say."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiohttp import web

from agent.kube.client import Connection, KubeSession
from tests.fakes.chance import NoChance
from tests.fakes.kubeworld import KUBECONFIG

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def a_session(handler: Handler, folder: Path) -> AsyncIterator[KubeSession]:
    """A session whose requests `handler` answers."""
    server = web.Server(handler, handler_cancellation=True, access_log=None)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    path = folder / "kubeconfig"
    path.write_text(KUBECONFIG.format(server=f"http://127.0.0.1:{port}", token="t"))  # noqa: S106 -- a test
    session = KubeSession(Connection(path), NoChance())
    try:
        yield session
    finally:
        await session.close()
        listener.close()
        await server.shutdown(0.1)


def answering(body: bytes, **headers: str) -> Handler:
    """Answer every request with this body."""

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=body, headers=headers)

    return answer


def streaming(*chunks: bytes) -> Handler:
    """Answer every request with a watch of these chunks, which ends then."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return await stream(request, *chunks)

    return answer


async def stream(request: web.BaseRequest, *chunks: bytes) -> web.StreamResponse:
    """Begin an answer of 200 and send the chunks; ending it is the caller's."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
        await asyncio.sleep(0)
    return response
