"""Imports, on a separate thread, what the registration does not need."""

import asyncio
import contextlib
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import structlog

from agent.app.adapters import Adapters
from agent.app.running import AgentParts
from agent.app.watching import WebDoor, WebSubjects
from agent.core.errors import AgentError, PermissionFault, SettingsError
from agent.host.kube.connection import Connection
from agent.host.worker import Worker
from agent.kit.news import news
from agent.kit.running_time import Lag
from agent.services.report.announce import NodeEventQueue
from agent.settings.sections import Settings

if TYPE_CHECKING:
    from agent.app.back import Back
    from agent.app.plain import PlainBack

LOAD_DELAY = 0.25
"""Seconds after which the back half is loaded even if the kubelet was not reached yet."""

OPEN_DEADLINE = 2.0
"""Seconds that answers wait for the API client's import and its credentials. Answers for which the
API server is not needed wait too."""

LAST_DEADLINE = 10.0
"""Seconds to post the last Events when the settings end the process."""

log = structlog.get_logger(__name__)

OpenWeb = Callable[..., contextlib.AbstractAsyncContextManager[object]]


def back_half() -> "Callable[..., contextlib.AbstractAsyncContextManager[Back]]":
    """Import the back half, on a thread."""
    from agent.app.back import open_back  # noqa: PLC0415 -- late on purpose

    return open_back


def plain_half() -> "Callable[..., contextlib.AbstractAsyncContextManager[PlainBack]]":
    """Import the back half of plain mode, on a thread."""
    from agent.app.plain import open_plain  # noqa: PLC0415 -- late on purpose

    return open_plain


def settle() -> None:
    """Exempt what was loaded from garbage collections: each would halt the loop for 50 ms."""
    gc.freeze()


async def load_back(
    settings: Settings, connection: Connection | None, adapters: Adapters, parts: AgentParts
) -> None:
    """Open the back half when the kubelet was reached, after LOAD_DELAY at most; keep it open."""
    front = parts.front
    await news(front.registration.state, within=LOAD_DELAY)
    opening: contextlib.AbstractAsyncContextManager[Back | PlainBack]
    if settings.plain is not None:
        open_plain = await adapters.loader.call(plain_half)
        opening = open_plain(settings, settings.plain, adapters, front)
    else:
        open_back = await adapters.loader.call(back_half)
        opening = open_back(settings, connection, adapters, front)
    async with opening as back:
        parts.back.set(back)
        for client in back.clients:
            await connected(client)
        settle()
        front.allocator.ready.set(back.allocation)
        await asyncio.Event().wait()


class Preloaded(Protocol):
    """A client that can be loaded before its use."""

    async def open(self) -> None:
        """Load it. Raises SettingsError."""
        ...


async def connected(session: Preloaded) -> None:
    """Load the API client before the first answer: the LIST of an answer has no time for that.

    The watches report a bad connection and try again, so errors are ignored here.
    """
    with contextlib.suppress(SettingsError, TimeoutError):
        async with Lag().within(OPEN_DEADLINE):
            await session.open()


async def post_last(
    settings: Settings, connection: Connection | None, adapters: Adapters, notices: NodeEventQueue
) -> None:
    """Post the waiting Events when the process ends before the back half is loaded.

    Best effort: the log also has the reason.
    """
    if connection is None or settings.observe:
        return
    from agent.host.kube.events import EventPoster  # noqa: PLC0415 -- late on purpose
    from agent.host.kube.session import KubeSession  # noqa: PLC0415 -- late on purpose

    session = KubeSession(connection, adapters.random)
    poster = EventPoster(session, settings.node, adapters.clock)
    try:
        async with asyncio.timeout(LAST_DEADLINE):
            await session.open()
            for event in notices.waiting:
                await poster.post(event)
    except (AgentError, TimeoutError, OSError) as error:
        log.info("event.not_posted", err=str(error) or "no answer")
    finally:
        await session.close()


def web_door() -> OpenWeb:
    """Import aiohttp and the web pages, on a thread: Register does not wait for it."""
    from agent.app.webdoor import open_web  # noqa: PLC0415 -- late on purpose

    return open_web


async def serve_web(
    settings: Settings, watched: WebSubjects, parts: AgentParts, loader: Worker, door: WebDoor
) -> None:
    """Serve the web pages at one listener, once the rest is loaded. Raises PermissionFault."""
    await parts.loaded()
    open_web = await loader.call(web_door)
    settle()
    try:
        async with open_web(settings, watched, door):
            watched.shut.pop(door, None)
            await asyncio.Event().wait()
    except PermissionFault as error:
        watched.shut[door] = str(error)
        raise
