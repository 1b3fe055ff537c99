"""The page and the read API of facts that a test makes, on a port of this machine."""

import contextlib
from collections.abc import AsyncIterator, Callable

from agent.web.api import ReadApi, Readers
from agent.web.page import PageDoor
from agent.web.server import Listeners, WebServer
from agent.web.status import StatusFacts


@contextlib.asynccontextmanager
async def serving_page(facts: Callable[[], StatusFacts | None]) -> AsyncIterator[str]:
    """The address."""
    readers = Readers()
    pages = {"/": PageDoor(facts, readers).page}
    listeners = Listeners("127.0.0.1", 0)
    async with WebServer(listeners, pages, None, ReadApi(facts, readers)) as server:
        yield f"http://127.0.0.1:{server.port}"
