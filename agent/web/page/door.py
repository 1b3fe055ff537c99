"""Answers GET of `/` with the page."""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from agent.web import aiohttp_server as web
from agent.web.page.document import POLICY, page_html
from agent.web.readers import Readers
from agent.web.status import StatusFacts, status_of

KEPT: Final = 0.5
"""Seconds for which a rendering is reused: many readers cost the loop no more than one."""

HEADERS: Final = {"Content-Security-Policy": POLICY}
LATER: Final = {"Retry-After": "3", "Refresh": "3"}
"""A browser asks again by itself."""


class _Rendering(msgspec.Struct, frozen=True):
    """The page. `until`: the loop time of its reuse."""

    html: bytes
    until: float


class PageDoor:
    """The page. `facts` is read for each rendering, without waiting; None: there is none yet."""

    def __init__(self, facts: Callable[[], StatusFacts | None], readers: Readers) -> None:
        self._facts = facts
        self._readers = readers
        self._kept: _Rendering | None = None

    def page(self, request: web.BaseRequest) -> web.Response:
        """Answer a GET or HEAD."""
        refused = self._readers.refused(request)
        if refused is not None:
            return refused
        rendering = self._rendered()
        if rendering is None:
            text = "This agent stands by or is still loading; this page tries again every 3 s.\n"
            return web.Response(status=503, text=text, headers=LATER)
        return web.Response(
            body=rendering.html, content_type="text/html", charset="utf-8", headers=HEADERS
        )

    def _rendered(self) -> _Rendering | None:
        """The page, rendered now or in the last KEPT seconds."""
        now = asyncio.get_running_loop().time()
        if self._kept is None or self._kept.until <= now:
            facts = self._facts()
            if facts is None:
                return None
            html = page_html(status_of(facts), facts.settings(), facts.now)
            self._kept = _Rendering(html.encode(), now + KEPT)
        return self._kept
