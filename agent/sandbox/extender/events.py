"""Events that are sent after the verb that gave rise to them was answered."""

import asyncio
from typing import Final, NoReturn

import structlog

from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.events import Events
from agent.sandbox.scheduler.filter import Notice

log = structlog.get_logger(__name__)
CAPACITY: Final = 1000
"""Events that wait; client-go keeps as many for HAMi and drops what comes then."""
_NAMED_BY: Final = ("namespace", "name", "uid")


class EventQueue:
    """Takes Events at once and hands them to `recorder` while it runs (`Events`)."""

    def __init__(self, recorder: Events, capacity: int = CAPACITY) -> None:
        self._recorder = recorder
        self._waiting: asyncio.Queue[tuple[Json, Notice]] = asyncio.Queue(capacity)

    async def record(self, pod: Json, notice: Notice) -> None:
        """Have one Event sent later; it is only logged where too many wait."""
        metadata = pod["metadata"]
        named = {"metadata": {key: metadata[key] for key in _NAMED_BY}}
        try:
            self._waiting.put_nowait((named, notice))
        except asyncio.QueueFull:
            log.warning("scheduler.event_lost", reason=notice.reason, err="too many Events wait")

    async def run(self) -> NoReturn:
        """Send for ever, one after another; what still waits at the end is lost."""
        while True:
            await self._recorder.record(*await self._waiting.get())
