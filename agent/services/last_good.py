"""The last good settings on disk, for a start at which their files are refused."""

import asyncio
from typing import NoReturn

import structlog

from agent.codec.last_good import encode_last_good
from agent.core.errors import StateError
from agent.core.last_good import LastGood
from agent.core.ports import Disk
from agent.kit.cell import Cell

log = structlog.get_logger(__name__)

RETRY = 30.0
"""Seconds until a disk that took no write is tried again."""


class LastGoodKeeper:
    """Writes `copy` whenever it differs from what is on disk, which is `stored` at first."""

    def __init__(
        self, disk: Disk, name: str, copy: Cell[LastGood | None], stored: LastGood | None
    ) -> None:
        self._disk = disk
        self._name = name
        self._copy = copy
        self._stored = stored
        self._is_failing = False

    async def run(self) -> NoReturn:
        """Keep it for ever."""
        async for _ in self._copy.follow():
            while (copy := self._copy.value) is not None and copy != self._stored:
                await self._write(copy)
        raise AssertionError("the cell is never closed")

    async def _write(self, copy: LastGood) -> None:
        try:
            await self._disk.replace(self._name, encode_last_good(copy))
        except StateError as error:
            if not self._is_failing:
                log.warning("config.copy_unwritable", err=str(error))
            self._is_failing = True
            await asyncio.sleep(RETRY)
            return
        self._stored, self._is_failing = copy, False
        log.debug("config.copied", file=self._name)
