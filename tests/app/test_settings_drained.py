"""Another resource name or scheduler is refused until the node is drained, then read again."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest
import structlog

from agent.app.settings import PERIOD, STILL
from agent.errors import SettingsError
from agent.kubelet.door import PREFERENCE_FOLLOWED
from agent.ledger import Ledger
from agent.settings.reading import Sources, SourcesRead
from tests.app.settings_room import SettingsRoom, a_plan, start_of
from tests.builders import a_row
from tests.services.at_work import at_work
from tests.unit.core.allocation.plain_scene import a_plain_row

OLD, NEW = "nvidia.com/gpu", "example.com/vgpu"
HELD = Ledger((a_row(),))
RENAMED = f"sharing: {{resourceName: {NEW}}}"
SOON = PERIOD + 3.0
"""Seconds in which files are read, and the kubelet's calls pause."""


@dataclasses.dataclass
class Written:
    """The settings file as it is now; each read finds the first of `drafts` instead, once."""

    own: str
    drafts: list[str] = dataclasses.field(default_factory=list)
    read_at: list[float] = dataclasses.field(default_factory=list)
    _reads: dict[str, SourcesRead] = dataclasses.field(default_factory=dict)

    async def look(self, last: SourcesRead | None, good: Sources) -> SourcesRead:
        self.read_at.append(asyncio.get_running_loop().time())
        text = self.drafts.pop(0) if self.drafts else self.own
        if text not in self._reads:
            try:
                plan = a_plan(text)
                self._reads[text] = SourcesRead(plan.sources, plan)
            except SettingsError as error:
                self._reads[text] = SourcesRead(Sources(), refusal=error)
        return self._reads[text]


@contextlib.asynccontextmanager
async def a_room(
    ledger: Ledger = HELD, own: str = ""
) -> AsyncIterator[tuple[SettingsRoom, Written]]:
    """A service that starts with these settings and rows on a node that needs no labels."""
    written = Written(own)
    room = SettingsRoom(start_of(a_plan(own)), look=written.look)
    room.ledger.set(ledger)
    room.service.tell_start(room.start)
    async with at_work(*room.tasks):
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
            f"c.yaml:1:25: sharing.resourceName cannot change from {OLD} to {NEW} while pods hold "
            "slices;"
        )
        assert event.text == room.trouble


async def test_with_the_last_row_the_name_comes_by_itself():
    async with a_room() as (room, written):
        written.own = RENAMED
        await room.service.read()
        room.ledger.set(Ledger((a_row(pod="other"),)))
        await asyncio.sleep(SOON)
        assert OLD == name_of(room)

        room.ledger.set(Ledger())
        await asyncio.sleep(SOON)

        assert (NEW, RENAMED, "") == (name_of(room), copied(room), room.trouble)
        assert 1 == len(room.told)


@pytest.mark.parametrize(("meanwhile", "told"), [("", 1), ("sharing: 7", 2)])
async def test_a_name_that_was_put_back_or_broken_does_not_come_with_the_last_row(meanwhile, told):
    async with a_room() as (room, written):
        for written.own in (RENAMED, meanwhile):
            await room.service.read()
        assert (meanwhile != "") == room.trouble.startswith("c.yaml:1:10: keys and values")
        room.ledger.set(Ledger())
        await asyncio.sleep(SOON)
        assert (OLD, told) == (name_of(room), len(room.told))

        written.own = RENAMED
        await asyncio.sleep(SOON)
        assert (NEW, "") == (name_of(room), room.trouble)


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
        with room.calls.busy():
            await asyncio.sleep(3 * PERIOD)
            assert OLD == name_of(room)

            written.own = "sharing: {splitCount: 4}"
            await asyncio.sleep(3 * PERIOD)
            assert 4 == room.split_count
            written.own = RENAMED
            await asyncio.sleep(SOON)
        await asyncio.sleep(2 * PERIOD)

        assert NEW == name_of(room)


@pytest.mark.parametrize(
    ("before", "after", "ledger"),
    [
        ("scheduler: hami", "scheduler: none", HELD),
        ("scheduler: none", "scheduler: hami", Ledger((a_plain_row(),))),
    ],
)
async def test_another_scheduler_waits_for_the_drain_and_then_for_the_restart(
    before, after, ledger
):
    async with a_room(ledger, before) as (room, written):
        with structlog.testing.capture_logs() as logs:
            written.own = after
            await room.service.read()
            assert "config.needs_restart" not in [line["event"] for line in logs]

            room.ledger.set(Ledger())
            await asyncio.sleep(SOON)

        (line,) = [line for line in logs if line["event"] == "config.needs_restart"]
        assert ["scheduler"] == line["settings"]
        assert "restart the agent" in line["what"]


# Files are read every five seconds, at once on demand, and what is half written is not taken.

FOUR, FIVE, SIX = (f"sharing: {{splitCount: {count}}}" for count in (4, 5, 6))


async def test_what_changed_while_the_agent_stood_by_is_read_at_once():
    written = Written(FOUR)
    room = SettingsRoom(start_of(a_plan("")), look=written.look)
    async with at_work(*room.tasks):
        await asyncio.sleep(2 * STILL)

    assert 4 == room.split_count


async def test_a_change_is_taken_once_two_reads_find_the_same():
    async with a_room(Ledger()) as (room, written):
        written.own, written.drafts = SIX, [FOUR, "sharing: {splitCou", FIVE]
        await asyncio.sleep(2 * PERIOD)
        assert ([], []) == (room.refreshed, room.told)
        await asyncio.sleep(PERIOD)

        assert ([6], []) == (room.refreshed, room.told)
        assert pytest.approx(STILL) == written.read_at[-1] - written.read_at[-2]


@pytest.mark.parametrize("drafts", [[], [FOUR]], ids=["at rest", "half written"])
async def test_who_asks_does_not_wait(drafts):
    async with a_room(Ledger()) as (room, written):
        written.own, written.drafts = SIX, list(drafts)
        loop = asyncio.get_running_loop()
        if drafts:
            await asyncio.sleep(written.read_at[-1] + PERIOD + STILL / 2 - loop.time())
        began = loop.time()
        room.asked.set()
        await asyncio.sleep(STILL / 10)

        assert (began, [6]) == (written.read_at[-1], room.refreshed)
        assert ["reloading", "ready"] == room.systemd.said
