"""A client of the agent's web server."""

import asyncio
from dataclasses import dataclass
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

DEADLINE: Final = 5.0


@dataclass(frozen=True, slots=True)
class WebAnswer:
    """An answer: its HTTP status and its text."""

    status: int
    text: str


async def fetch(address: str, path: str) -> WebAnswer:
    """The page at `path`.

    Raises:
        OSError, TimeoutError: no answer.
    """
    try:
        async with (
            asyncio.timeout(DEADLINE),
            aiohttp.ClientSession() as session,
            session.get(address + path) as answer,
        ):
            return WebAnswer(answer.status, await answer.text())
    except aiohttp.ClientError as error:
        raise ConnectionError(f"{address}{path}: {error}") from error


Sample = tuple[str, dict[str, str], float]


async def scrape(address: str) -> list[Sample]:
    """Every sample of the metrics page: name, labels, value.

    Raises:
        OSError, TimeoutError: no answer.
    """
    page = await fetch(address, "/metrics")
    families = text_string_to_metric_families(page.text)
    return [(s.name, dict(s.labels), float(s.value)) for f in families for s in f.samples]
