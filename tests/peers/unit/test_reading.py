"""What an old scheduler has read is what stood there when it set its own handshake."""

import asyncio
from pathlib import Path

import pytest

from agent import cluster as annotations
from agent.hami.register import encode_register, registered
from tests.builders import an_inventory
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import Sighting, Watched
from tests.peers.lab.identities import NODE
from tests.peers.lab.part import Part
from tests.peers.lab.reading import Reading
from tests.peers.lab.releases import MODEL, Release

OLD = Release((2, 7, 1))


class Running(Part):
    """A scheduler that is not there, and said to be."""

    def __init__(self, pid: int) -> None:
        super().__init__("extender", (), Path("/nowhere"))
        self.pid = pid

    @property
    def is_alive(self) -> bool:
        return bool(self.pid)


def show(nodes, handshake, register, at=None, slices="0"):
    notes = {annotations.HANDSHAKE: handshake, annotations.REGISTER: register}
    metadata = {"name": NODE, "annotations": {name: one for name, one in notes.items() if one}}
    seen = asyncio.get_running_loop().time() if at is None else at
    status = {"allocatable": {RESOURCE: slices}}
    nodes.take(Sighting(seen, "MODIFIED", {"metadata": metadata, "status": status}))


async def is_read(reading):
    try:
        async with asyncio.timeout(0.0):
            await reading.until_current()
    except TimeoutError:
        return False
    return True


@pytest.fixture
def nodes():
    return Watched()


async def test_it_has_read_what_it_answered_to(nodes):
    reading = Reading(OLD, nodes, Running(1))
    show(nodes, "Reported 1", "one:")
    assert not await is_read(reading)
    show(nodes, "Requesting_1", "one:")
    assert await is_read(reading)
    show(nodes, "Requesting_1", "two:")
    assert not await is_read(reading)
    show(nodes, "Requesting_2", "two:")
    assert await is_read(reading)


async def test_what_it_has_read_stays_known_when_the_watch_forgets(nodes):
    reading = Reading(OLD, nodes, Running(1))
    show(nodes, "Requesting_1", "one:")
    reading.forget()
    nodes.forget()
    show(nodes, "Reported 2", "one:")
    assert await is_read(reading)


async def test_it_has_dropped_what_it_says_is_deleted(nodes):
    reading = Reading(OLD, nodes, Running(1))
    show(nodes, "Requesting_1", "one:")
    show(nodes, "Deleted_2", "one:")
    show(nodes, "Reported 3", "one:")
    assert not await is_read(reading)


async def test_another_process_has_read_nothing_and_one_that_is_gone_is_not_waited_for(nodes):
    scheduler = Running(1)
    reading = Reading(OLD, nodes, scheduler)
    show(nodes, "Requesting_1", "one:")
    assert await is_read(reading)
    scheduler.pid = 2
    assert not await is_read(reading)
    scheduler.pid = 0
    assert await is_read(reading)


async def test_nobody_waits_for_a_newer_one_or_where_nothing_is_told(nodes):
    show(nodes, "Reported 1", "")
    assert await is_read(Reading(OLD, nodes, Running(1)))
    show(nodes, "Reported 1", "one:")
    assert await is_read(Reading(MODEL, nodes, Running(1)))


async def test_a_newer_one_that_has_read_other_gpus_is_waited_for(nodes):
    scheduler = Running(1)
    reading = Reading(MODEL, nodes, scheduler)
    one, other = (encode_register(registered(an_inventory(count=count))) for count in (1, 2))
    show(nodes, "Requesting_1", one)
    assert await is_read(reading)
    show(nodes, "", other)
    assert not await is_read(reading)
    show(nodes, "", "")
    assert await is_read(reading)
    show(nodes, "", other)
    show(nodes, "Requesting_2", other)
    assert await is_read(reading)
    show(nodes, "", one)
    scheduler.pid = 2
    assert await is_read(reading)


async def test_a_newer_one_has_read_after_its_look_what_nobody_tells_it_to(nodes):
    one, other = (encode_register(registered(an_inventory(count=count))) for count in (1, 2))
    now = asyncio.get_running_loop().time()
    for release, slices, since, known in (
        (MODEL, "80", 20.0, True),
        (MODEL, "80", 10.0, False),
        (MODEL, "0", 20.0, False),
        (Release((2, 9, 0)), "80", 20.0, False),
    ):
        nodes.forget()
        reading = Reading(release, nodes, Running(1))
        show(nodes, "Requesting_1", one, now - 60.0, slices)
        show(nodes, "Requesting_1", other, now - since, slices)
        assert known == await is_read(reading)
