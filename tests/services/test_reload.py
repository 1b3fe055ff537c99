"""Settings are read once their files lie still, at once on demand, and never for nothing."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import NoReturn

import pytest

from agent.services.reload import READ_DEADLINE, RESTLESS, STILL, Reload

OWN = Path("/etc/hami-agent/config.yaml")
HAMIS = Path("/etc/hami/config.json")


@dataclasses.dataclass
class FakeWatch:
    """The FileWatch port: `change` says that something changed."""

    followed: list[frozenset[Path]] = dataclasses.field(default_factory=list)
    change: Callable[[], None] = lambda: None

    async def follow(self, paths: Collection[Path], changed: Callable[[], None]) -> NoReturn:
        self.followed.append(frozenset(paths))
        self.change = changed
        changed()
        await asyncio.Event().wait()
        raise AssertionError


@dataclasses.dataclass
class Room:
    """A reload whose readings are noted: when, and whether somebody had asked."""

    watch: FakeWatch
    asked: asyncio.Event
    readings: list[tuple[float, bool]]
    paths: list[Path]
    takes: float = 0.0

    async def read(self, *, asked: bool) -> Collection[Path]:
        self.readings.append((asyncio.get_running_loop().time(), asked))
        await asyncio.sleep(self.takes)
        return self.paths


@contextlib.asynccontextmanager
async def reloading() -> AsyncIterator[Room]:
    """The service at work, its first reading done."""
    room = Room(FakeWatch(), asyncio.Event(), [], [OWN])
    reload = Reload(room.watch, [OWN], room.read, room.asked)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(reload.run())
        await asyncio.sleep(1)
        assert 1 == len(room.readings)
        room.readings.clear()
        yield room
        running.cancel()


async def test_a_change_is_read_once_it_lies_still():
    async with reloading() as room:
        began = asyncio.get_running_loop().time()
        for _ in range(4):
            room.watch.change()
            await asyncio.sleep(STILL / 2)
        await asyncio.sleep(5)

        ((when, is_asked),) = room.readings
        assert not is_asked
        assert when == pytest.approx(began + 2.5 * STILL)


async def test_files_that_never_lie_still_are_read_nevertheless():
    async with reloading() as room:
        for _ in range(200):
            room.watch.change()
            await asyncio.sleep(STILL / 4)

        assert 4 <= len(room.readings) <= 10 / RESTLESS


async def test_who_asks_does_not_wait():
    async with reloading() as room:
        began = asyncio.get_running_loop().time()
        room.asked.set()
        await asyncio.sleep(1)

        assert [(began, True)] == room.readings


async def test_who_asks_while_files_change_does_not_wait_either():
    async with reloading() as room:
        began = asyncio.get_running_loop().time()
        room.watch.change()
        await asyncio.sleep(STILL / 2)
        room.asked.set()
        await asyncio.sleep(1)

        assert [(began + STILL / 2, True)] == room.readings


async def test_a_change_during_a_reading_is_read_again():
    async with reloading() as room:
        room.takes = 0.5
        room.watch.change()
        await asyncio.sleep(STILL + 0.1)
        room.watch.change()
        await asyncio.sleep(5)

        assert 2 == len(room.readings)


async def test_other_files_are_watched_when_the_settings_name_them():
    async with reloading() as room:
        room.paths = [OWN, HAMIS]
        room.watch.change()
        await asyncio.sleep(1)

        assert [{OWN}, {OWN, HAMIS}] == room.watch.followed
        # The first look at them comes after they are watched: nothing in between is missed.
        assert 2 == len(room.readings)
        room.watch.change()
        await asyncio.sleep(1)
        assert 3 == len(room.readings)


async def test_nothing_is_read_when_nothing_changes():
    async with reloading() as room:
        await asyncio.sleep(86_400)

        assert [] == room.readings


async def test_a_file_system_that_hangs_ends_the_service_which_is_then_started_again():
    room = Room(FakeWatch(), asyncio.Event(), [], [OWN], takes=1e9)
    reload = Reload(room.watch, [OWN], room.read, room.asked)
    began = asyncio.get_running_loop().time()

    with pytest.raises(ExceptionGroup) as caught:
        await reload.run()

    assert (None, 1) == (caught.value.split(TimeoutError)[1], len(caught.value.exceptions))
    assert READ_DEADLINE + STILL == pytest.approx(asyncio.get_running_loop().time() - began)
