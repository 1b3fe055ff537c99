"""The page and the read API of facts that a test makes, on a port of this machine."""

import contextlib
from collections.abc import AsyncIterator, Callable

from agent.status import StatusFacts
from agent.web.server import reading_pages, serve_port


@contextlib.asynccontextmanager
async def serving_page(facts: Callable[[], StatusFacts]) -> AsyncIterator[str]:
    """The address."""
    async with serve_port(reading_pages(facts), "127.0.0.1", 0) as port:
        yield f"http://127.0.0.1:{port}"
