"""Settings are read once their files lie still, at once on demand, and never for nothing."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.app.settings import AGAIN, RESTLESS, STILL
from agent.errors import SettingsError
from agent.settings.reading import SourcesRead
from agent.settings.sources import Sources
from tests.app.settings_room import SettingsRoom, a_plan, start_of
from tests.services.at_work import at_work

OWN = Path("/etc/hami-agent/config.yaml")
HAMIS = Path("/etc/hami/config.json")


@dataclasses.dataclass
class SettingsFiles:
    """Sources whose looks are noted: when, and whether somebody had asked."""

    readings: list[tuple[float, bool]] = dataclasses.field(default_factory=list)
    paths: list[Path] = dataclasses.field(default_factory=lambda: [OWN])
    takes: float = 0.0
    refusal: SettingsError | None = None
    silent: bool = False

    def __post_init__(self) -> None:
        self.room = SettingsRoom(start_of(a_plan(""), OWN), look=self.look)
        self.watch, self.asked = self.room.watch, self.room.asked

    async def look(self, good: Sources) -> SourcesRead:
        is_asked = "reloading" in self.room.systemd.said
        self.room.systemd.said.clear()
        self.readings.append((asyncio.get_running_loop().time(), is_asked))
        await asyncio.sleep(self.takes)
        return SourcesRead(frozenset(self.paths), good, refusal=self.refusal, silent=self.silent)


@contextlib.asynccontextmanager
async def reloading() -> AsyncIterator[tuple[SettingsFiles, float]]:
    """The service at work, its first reading done, and the time."""
    files = SettingsFiles()
    async with at_work(files.room.service.run):
        await asyncio.sleep(1)
        assert 1 == len(files.readings)
        files.readings.clear()
        yield files, asyncio.get_running_loop().time()


async def test_nothing_is_read_when_nothing_changes_and_a_change_once_it_lies_still():
    async with reloading() as (room, _):
        await asyncio.sleep(86_400)
        assert [] == room.readings
        began = asyncio.get_running_loop().time()
        for _ in range(4):
            room.watch.change()
            await asyncio.sleep(STILL / 2)
        await asyncio.sleep(5)

        ((when, is_asked),) = room.readings
        assert not is_asked
        assert when == pytest.approx(began + 2.5 * STILL)


async def test_files_that_never_lie_still_are_read_nevertheless():
    async with reloading() as (room, _):
        for _ in range(200):
            room.watch.change()
            await asyncio.sleep(STILL / 4)

        assert 4 <= len(room.readings) <= 10 / RESTLESS


@pytest.mark.parametrize("after_a_change", [0.0, STILL / 2])
async def test_who_asks_does_not_wait(after_a_change: float):
    async with reloading() as (room, began):
        if after_a_change:
            room.watch.change()
            await asyncio.sleep(after_a_change)
        room.asked.set()
        await asyncio.sleep(1)

        assert [(began + after_a_change, True)] == room.readings


async def test_a_change_during_a_reading_is_read_again():
    async with reloading() as (room, _):
        room.takes = 0.5
        room.watch.change()
        await asyncio.sleep(STILL + 0.1)
        room.watch.change()
        await asyncio.sleep(5)

        assert 2 == len(room.readings)


async def test_other_files_are_watched_when_the_settings_name_them_and_those_before_if_refused():
    async with reloading() as (room, _):
        room.paths = [OWN, HAMIS]
        room.watch.change()
        await asyncio.sleep(1)

        assert [{OWN}, {OWN, HAMIS}] == room.watch.followed
        # The first look at them comes after they are watched: nothing in between is missed.
        assert 2 == len(room.readings)
        # A refused read may not have told of all.
        for refusal, watched in ((SettingsError("no"), {OWN, HAMIS}), (None, {HAMIS})):
            room.paths, room.refusal = [HAMIS], refusal
            room.watch.change()
            await asyncio.sleep(1)
            assert watched == room.watch.followed[-1]


async def test_a_file_system_that_hangs_is_asked_again_until_it_answers():
    async with reloading() as (room, _):
        room.refusal, room.silent = SettingsError("no answer"), True
        room.watch.change()
        await asyncio.sleep(3.5 * (AGAIN + STILL))
        assert 4 == len(room.readings)

        room.refusal, room.silent = None, False
        await asyncio.sleep(86_400)
        assert 5 == len(room.readings)
        assert ["ConfigRejected"] == [event.reason for event in room.room.told]
