"""The last good settings are on disk whenever they changed, and written for nothing else."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from agent.app.settings import RETRY
from agent.errors import StateError
from agent.kit.cell import Cell
from agent.ledger import LastGood
from agent.state import decode_last_good
from tests.app.settings_room import SettingsRoom, a_plan, start_of

ONE = LastGood("0.1.0", "node-a")
OTHER = LastGood("0.1.0", "node-a", {"pool": "big"})


class Shelf:
    """The Disk port, which refuses while `is_full`."""

    place = "/state"

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_full = False

    async def read(self, name: str) -> bytes | None:
        raise AssertionError(name)

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        assert ("settings.json", None) == (name, keep)
        if self.is_full:
            raise StateError("/state cannot be written: no space")
        self.written.append(data)


@contextlib.asynccontextmanager
async def keeping(shelf: Shelf, stored: LastGood | None) -> AsyncIterator[Cell[LastGood | None]]:
    service = SettingsRoom(start_of(a_plan("")), disk=shelf).service
    service.recall(stored)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(service.run())
        yield service.copy
        running.cancel()


async def test_each_change_is_written_once():
    shelf = Shelf()
    async with keeping(shelf, None) as copy:
        for value in (ONE, ONE, OTHER):
            copy.set(value)
            await asyncio.sleep(1)

    assert [ONE, OTHER] == [decode_last_good(one) for one in shelf.written]


async def test_what_is_on_disk_already_is_not_written():
    shelf = Shelf()
    async with keeping(shelf, ONE) as copy:
        copy.set(ONE)
        await asyncio.sleep(1)

    assert [] == shelf.written


async def test_a_disk_that_takes_no_write_is_said_once_and_tried_again():
    shelf = Shelf()
    shelf.is_full = True
    with structlog.testing.capture_logs() as logs:
        async with keeping(shelf, None) as copy:
            copy.set(ONE)
            await asyncio.sleep(3 * RETRY)
            copy.set(OTHER)
            shelf.is_full = False
            await asyncio.sleep(RETRY)

    assert [OTHER] == [decode_last_good(one) for one in shelf.written]
    assert ["config.copy_unwritable"] == [
        line["event"] for line in logs if line["log_level"] == "warning"
    ]
