"""Another resource name or scheduler is refused until the node is drained, then read again."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from agent.app.settings import AGAIN, QUIET, RESTLESS, STILL
from agent.errors import SettingsError
from agent.kubelet.door import PREFERENCE_FOLLOWED
from agent.ledger import LastGood, Ledger, SourceFile
from agent.model import Scan
from agent.settings.reading import SourcesRead
from agent.settings.sources import Sources
from tests.app.settings_room import SettingsRoom, a_plan, start_of
from tests.builders import a_gpu, a_row
from tests.services.at_work import at_work
from tests.unit.core.allocation.plain_scene import a_plain_row

OLD, NEW = "nvidia.com/gpu", "example.com/vgpu"
HELD = Ledger((a_row(),))
RENAMED = f"sharing: {{resourceName: {NEW}}}"
SOON = 3.0
"""Seconds in which files are looked at after news, and the kubelet's calls pause."""


@dataclasses.dataclass
class Written:
    """The settings file as it is now."""

    own: str

    async def look(self, good: Sources) -> SourcesRead:
        try:
            plan = a_plan(self.own)
        except SettingsError as error:
            return SourcesRead(frozenset(), good, refusal=error)
        return SourcesRead(frozenset(), plan.sources, None if plan.sources == good else plan)


@contextlib.asynccontextmanager
async def a_room(
    ledger: Ledger = HELD, own: str = ""
) -> AsyncIterator[tuple[SettingsRoom, Written]]:
    """A service that starts with these settings and rows on a node whose GPUs are known."""
    written = Written(own)
    room = SettingsRoom(start_of(a_plan(own)), look=written.look)
    room.ledger.set(ledger)
    room.service.tell_start(room.start)
    room.service.saw_gpus(Scan("570", (a_gpu(),)))
    async with at_work(room.service.run):
        await asyncio.sleep(SOON)
        yield room, written


def copied(room: SettingsRoom) -> str:
    copy = room.service.copy.value
    return copy.own.content.decode() if copy and copy.own else ""


def name_of(room: SettingsRoom) -> str:
    cells = room.cells
    names = {cells.resource.value, cells.sharing.value.resource, cells.edits.value.resource}
    (name,) = names
    return name


async def test_while_a_pod_holds_slices_another_name_is_told_once_and_the_old_one_stays():
    async with a_room() as (room, written):
        written.own = RENAMED
        for _ in range(2):
            await room.service.read()

        assert OLD == name_of(room)
        (event,) = room.told
        assert ("ConfigRejected", True) == (event.reason, event.warning)
        assert event.text.startswith(
            f"c.yaml:1:25: sharing.resourceName cannot change from {OLD} to {NEW} while slices are "
            "held by team-a/train-0;"
        )
        assert event.text == room.service.trouble


async def test_with_the_last_row_the_name_comes_by_itself():
    async with a_room() as (room, written):
        written.own = RENAMED
        await room.service.read()
        room.ledger.set(Ledger((a_row(pod="other"),)))
        await asyncio.sleep(SOON)
        assert OLD == name_of(room)

        room.ledger.set(Ledger())
        await asyncio.sleep(SOON)

        assert (NEW, RENAMED, "") == (name_of(room), copied(room), room.service.trouble)
        assert 1 == len(room.told)


@pytest.mark.parametrize(
    ("own", "count", "told"),
    [
        ("sharing: {splitCount: 4}", 4, 0),
        (f"sharing: {{resourceName: {NEW}, splitCount: 4}}", 10, 1),
    ],
)
async def test_a_file_is_taken_over_whole_or_not_at_all_while_pods_hold_slices(own, count, told):
    async with a_room() as (room, written):
        written.own = own
        await room.service.read()

        assert (count, OLD, told) == (room.split_count, name_of(room), len(room.told))


@pytest.mark.parametrize(("meanwhile", "told"), [("", 1), ("sharing: 7", 2)])
async def test_a_name_that_was_put_back_or_broken_does_not_come_with_the_last_row(meanwhile, told):
    async with a_room() as (room, written):
        for written.own in (RENAMED, meanwhile):
            await room.service.read()
        assert (meanwhile != "") == room.service.trouble.startswith("c.yaml:1:10: sharing: ")
        room.ledger.set(Ledger())
        await asyncio.sleep(SOON)
        assert (OLD, told) == (name_of(room), len(room.told))

        written.own = RENAMED
        room.watch.change()
        await asyncio.sleep(SOON)
        assert (NEW, "") == (name_of(room), room.service.trouble)


async def test_a_file_that_is_touched_while_its_name_waits_says_nothing_and_who_asks_is_answered():
    async with a_room() as (room, written):
        written.own = RENAMED
        await room.service.read()
        with structlog.testing.capture_logs() as logs:
            await room.service.read()
            assert [] == logs
            await room.service.read(asked=True)

        assert ["config.rejected"] == [line["event"] for line in logs]
        assert 1 == len(room.told)


async def test_an_answer_that_is_under_way_counts_before_its_row_does():
    async with a_room(Ledger()) as (room, written):
        written.own = RENAMED
        async with asyncio.TaskGroup() as group:
            with room.calls.busy():
                group.create_task(room.service.read())
                await asyncio.sleep(1)
                assert OLD == name_of(room)
                room.ledger.set(HELD)

        assert (OLD, 1) == (name_of(room), len(room.told))


async def test_a_new_name_comes_between_two_admissions_and_not_within_one():
    """The Allocate of a pod comes some time after its preference."""
    async with a_room(Ledger()) as (room, written):
        written.own = RENAMED
        async with asyncio.TaskGroup() as group:
            with room.calls.busy():
                group.create_task(room.service.read())
                await asyncio.sleep(0)
            await asyncio.sleep(PREFERENCE_FOLLOWED / 2)
            assert OLD == name_of(room)

        assert NEW == name_of(room)


async def test_calls_without_a_pause_hold_up_a_name_and_no_other_settings_and_it_is_tried_again():
    async with a_room(Ledger()) as (room, written):
        written.own = RENAMED
        with structlog.testing.capture_logs() as logs, room.calls.busy():
            room.watch.change()
            await asyncio.sleep(SOON + QUIET)
            assert ["config.waits"] == [line["event"] for line in logs]
            assert OLD == name_of(room)

            written.own = "sharing: {splitCount: 4}"
            await asyncio.sleep(AGAIN)
            assert 4 == room.split_count
            written.own = RENAMED
            room.watch.change()
            await asyncio.sleep(SOON)
        await asyncio.sleep(QUIET + AGAIN)

        assert NEW == name_of(room)


@pytest.mark.parametrize(
    ("before", "after", "ledger"),
    [
        ("scheduler: hami", "scheduler: none", HELD),
        ("scheduler: none", "scheduler: hami", Ledger((a_plain_row(),))),
    ],
)
async def test_another_scheduler_waits_for_the_drain_and_then_for_the_restart(
    before: str, after: str, ledger: Ledger
):
    async with a_room(ledger, before) as (room, written):
        with structlog.testing.capture_logs() as logs:
            written.own = after
            await room.service.read()
            assert "then restart the agent" in room.told[0].text
            assert "config.needs_restart" not in [line["event"] for line in logs]

            room.ledger.set(Ledger())
            await asyncio.sleep(SOON)

        (line,) = [line for line in logs if line["event"] == "config.needs_restart"]
        assert ["scheduler"] == line["settings"]
        assert "restart the agent" in line["what"]
        assert (after == "scheduler: none") == ("remove the report" in line["what"])


def a_copy(own: str) -> LastGood:
    return LastGood("0.1.0", "node-a", own=SourceFile("c.yaml", own.encode()))


@pytest.mark.parametrize(("rows", "stands_in"), [(Ledger(), True), (HELD, False)])
def test_last_good_settings_stand_in_for_ones_too_large_unless_the_rows_refuse_them(
    rows: Ledger, *, stands_in: bool
):
    room = SettingsRoom(start_of(a_plan("sharing: {splitCount: 10000}")))
    room.ledger.set(rows)
    room.service.recall(a_copy(RENAMED))
    many = Scan("570", tuple(a_gpu(index=n) for n in range(8)))

    assert (many if stands_in else None) == room.service.saw_gpus(many)
    assert stands_in == (not room.stop.is_set())
    assert stands_in == (NEW == name_of(room))


# Settings are read once their files lie still, at once on demand, and never for nothing.


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
