"""The journal keeps what happened in 24 hours, the newest first, and no more than it may."""

import asyncio
import contextlib
import datetime as dt

import structlog

from agent import state as module
from agent.cluster import NodeEvent
from agent.errors import Refusal, RefusalReason, StateError
from agent.report import NodeEventQueue
from agent.state import NodeJournal
from tests.builders import NOON, a_row
from tests.fakes.clock import ManualClock
from tests.services.at_work import at_work

REFUSAL = Refusal(RefusalReason.NO_LOCK, "no lock")


def test_the_newest_comes_first_and_yesterday_is_gone():
    clock = ManualClock(NOON)
    journal = NodeJournal(clock, JournalDisk())
    journal.changed(NodeEvent("GpuUnhealthy", "GPU 1", warning=True))
    clock.advance(3600)
    journal.changed(NodeEvent("GpuRecovered", "GPU 1", warning=False))

    assert ["GpuRecovered", "GpuUnhealthy"] == [entry.reason for entry in journal.changes]

    clock.advance(23 * 3600)
    assert ["GpuRecovered"] == [entry.reason for entry in journal.changes]


def test_a_refusal_names_the_container_if_it_is_known():
    journal = NodeJournal(ManualClock(NOON), JournalDisk())
    row = a_row()
    journal.refused(REFUSAL, None)
    journal.refused(REFUSAL, row)

    known, unknown = journal.refusals
    assert ("HA-2005", "no lock", NOON) == (known.reason, known.text, known.at)
    assert (row.namespace, row.pod, row.key.container) == (
        known.namespace,
        known.pod,
        known.container,
    )
    assert ("", "", "") == (unknown.namespace, unknown.pod, unknown.container)


def test_a_pod_that_is_refused_for_ever_takes_no_more_room_than_the_limit():
    journal = NodeJournal(ManualClock(NOON), JournalDisk())
    for _ in range(module.LIMIT + 7):
        journal.refused(REFUSAL, None)

    assert module.LIMIT == len(journal.refusals)


def test_every_event_that_is_queued_is_a_change_and_one_that_is_repeated_is_not():
    journal = NodeJournal(ManualClock(NOON), JournalDisk())
    queue = NodeEventQueue(journal.changed)
    event = NodeEvent("ConfigApplied", "applied", warning=False)
    queue.say(event)
    queue.say(event)

    assert ["ConfigApplied"] == [entry.reason for entry in journal.changes]


async def test_a_restart_forgets_nothing_and_a_quiet_node_writes_nothing():
    clock, disk = ManualClock(NOON), JournalDisk()
    journal = NodeJournal(clock, disk)
    async with running(journal):
        journal.changed(NodeEvent("GpuUnhealthy", "GPU 1", warning=True))
        await asyncio.sleep(module.PERIOD)
        journal.refused(REFUSAL, a_row())
    writes = disk.writes

    clock.advance(3600)
    later = NodeJournal(clock, disk)
    await later.recall()
    async with running(later):
        await asyncio.sleep(10 * module.PERIOD)
        assert writes == disk.writes
        later.changed(NodeEvent("GpuRecovered", "GPU 1", warning=False))
    assert ["GpuRecovered", "GpuUnhealthy"] == [entry.reason for entry in later.changes]
    assert ["HA-2005"] == [entry.reason for entry in later.refusals]
    assert NOON == later.since

    clock.advance(24 * 3600)
    assert () == later.refusals
    assert NOON + dt.timedelta(hours=1) == later.since


async def test_a_pod_that_is_refused_again_and_again_is_written_once_in_a_while():
    disk = JournalDisk()
    journal = NodeJournal(ManualClock(NOON), disk)
    async with running(journal):
        for _ in range(100):
            journal.refused(REFUSAL, None)
            await asyncio.sleep(module.PERIOD / 50)

    assert 3 >= disk.writes


async def test_a_journal_that_cannot_be_read_begins_anew_and_is_written_again():
    disk = JournalDisk({module.FILE: b"{"})
    journal = NodeJournal(ManualClock(NOON), disk)
    with structlog.testing.capture_logs() as logs:
        await journal.recall()
    assert ["journal.unreadable"] == [line["event"] for line in logs]

    async with running(journal):
        journal.refused(REFUSAL, None)
    later = NodeJournal(ManualClock(NOON), disk)
    await later.recall()
    assert 1 == len(later.refusals)


async def test_a_disk_that_cannot_be_written_stops_nothing():
    disk = JournalDisk()
    journal = NodeJournal(ManualClock(NOON), disk)
    disk.fail = True
    async with running(journal):
        journal.refused(REFUSAL, None)
        await asyncio.sleep(module.PERIOD)
        disk.fail = False
        journal.refused(REFUSAL, None)
        await asyncio.sleep(module.PERIOD)

    assert 1 == disk.writes


@contextlib.asynccontextmanager
async def running(journal):
    """The journal at work, stopped as the agent stops it."""
    async with at_work(journal.run):
        await asyncio.sleep(0)
        yield
        await asyncio.sleep(0)


class JournalDisk:
    """The state directory in memory. `fail`: it cannot be written."""

    place = "memory"

    def __init__(self, files=()):
        self.files = dict(files)
        self.writes = 0
        self.fail = False

    async def read(self, name):
        return self.files.get(name)

    async def replace(self, name, data, *, keep=None):
        if self.fail:
            raise StateError("the disk is full")
        self.files[name] = data
        self.writes += 1
