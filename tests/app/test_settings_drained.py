"""The resource's name and the scheduler wait until the node is drained, then come by themselves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import structlog

from agent.app.settings import fitting
from agent.core.errors import SettingsError
from agent.core.inventory.gpu import Scan
from agent.core.state.last_good import LastGood, SourceFile
from agent.core.state.ledger import Ledger
from agent.settings.reading import SourcesRead
from agent.settings.sources import Sources
from agent.settings.values import NodeValues
from tests.app.settings_room import SettingsRoom, a_plan, start_of
from tests.builders import a_gpu, a_row
from tests.unit.core.allocation.plain_scene import a_plain_row

OLD, NEW = "nvidia.com/gpu", "example.com/vgpu"
HELD = Ledger((a_row(),))
RENAMED = f"sharing: {{resourceName: {NEW}}}"
SOON = 3.0
"""Seconds in which files are looked at after news."""


class Written:
    """The settings file as it is now."""

    def __init__(self, own: str = "") -> None:
        self.own = own

    async def look(self, good: Sources) -> SourcesRead:
        plan = a_plan(self.own)
        return SourcesRead(frozenset(), plan.sources, None if plan.sources == good else plan)


@contextlib.asynccontextmanager
async def a_room(
    ledger: Ledger = HELD, own: str = ""
) -> AsyncIterator[tuple[SettingsRoom, Written]]:
    """A service that runs with these settings and rows on a node whose GPUs are known."""
    written = Written(own)
    room = SettingsRoom(start_of(a_plan(own)), look=written.look)
    room.ledger.set(ledger)
    room.service.saw_gpus(Scan("570", (a_gpu(),)))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(room.service.run())
        await asyncio.sleep(SOON)
        yield room, written
        running.cancel()


def copied(room: SettingsRoom) -> str:
    copy = room.service.copy.value
    return copy.own.content.decode() if copy and copy.own else ""


def name_of(room: SettingsRoom) -> str:
    cells = room.cells
    names = {cells.resource.value, cells.sharing.value.resource, cells.edits.value.resource}
    (name,) = names
    return name


async def test_while_a_pod_holds_slices_another_name_is_refused_once_and_the_old_one_stays():
    async with a_room() as (room, written):
        written.own = RENAMED
        for _ in range(2):
            await room.service.read()

        assert (OLD, "") == (name_of(room), copied(room))
        (event,) = room.told
        assert ("ConfigRejected", True) == (event.reason, event.warning)
        assert event.text.startswith(
            f"c.yaml:1:25: sharing.resourceName: {NEW} cannot replace {OLD}"
        )
        assert "held by 1 pod (team-a/train-0)" in event.text


async def test_with_the_last_row_the_name_comes_by_itself():
    async with a_room() as (room, written):
        written.own = RENAMED
        await room.service.read()
        room.ledger.set(Ledger((a_row(pod="other"),)))
        await asyncio.sleep(SOON)
        assert OLD == name_of(room)

        room.ledger.set(Ledger())
        await asyncio.sleep(SOON)

        assert (NEW, RENAMED) == (name_of(room), copied(room))
        assert 1 == len(room.told)


async def test_settings_that_keep_the_name_are_taken_over_while_pods_hold_slices():
    async with a_room() as (room, written):
        written.own = "sharing: {splitCount: 4}"
        await room.service.read()

        assert (4, []) == (room.split_count, room.told)


async def test_a_file_with_another_name_is_refused_whole_and_goes_once_the_name_is_put_back():
    async with a_room() as (room, written):
        written.own = f"sharing: {{resourceName: {NEW}, splitCount: 4}}"
        await room.service.read()
        assert 10 == room.split_count

        written.own = "sharing: {splitCount: 4}"
        await room.service.read()
        room.ledger.set(Ledger())
        await asyncio.sleep(SOON)

        assert (4, OLD, 1) == (room.split_count, name_of(room), len(room.told))


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


@pytest.mark.parametrize(
    ("before", "after", "ledger"),
    [
        ("scheduler: hami", "scheduler: none", HELD),
        ("scheduler: none", "scheduler: hami", Ledger((a_plain_row(),))),
    ],
)
async def test_another_scheduler_is_refused_and_then_waits_for_the_restart(before, after, ledger):
    async with a_room(ledger, before) as (room, written):
        written.own = after
        await room.service.read()
        assert "then restart the agent" in room.told[0].text
        assert before == copied(room)

        with structlog.testing.capture_logs() as logs:
            room.ledger.set(Ledger())
            await asyncio.sleep(SOON)

        (line,) = [line for line in logs if line["event"] == "config.needs_restart"]
        assert ["scheduler"] == line["settings"]
        # What comes until then is answered as before, and has to fit the copy at the next start.
        assert before == copied(room)


def a_copy(own: str) -> LastGood:
    return LastGood("0.1.0", "node-a", own=SourceFile("c.yaml", own.encode()))


def started(own: str, stored: LastGood | None, ledger: Ledger = HELD) -> tuple[str, NodeValues]:
    """Why the settings that were read are not used, and those that are."""
    start = fitting(start_of(a_plan(own)), stored, ledger)
    return str(start.refusal or ""), start.taken()


def test_a_start_with_another_name_goes_on_with_the_last_good_settings():
    refusal, plan = started(RENAMED, a_copy("sharing: {splitCount: 4}"))

    assert f"{NEW} cannot replace {OLD}" in refusal
    assert b"sharing: {splitCount: 4}" == plan.sources.own.content


def test_a_start_on_a_drained_node_takes_the_new_name():
    refusal, plan = started(RENAMED, a_copy(""), Ledger())

    assert "" == refusal
    assert RENAMED.encode() == plan.sources.own.content


@pytest.mark.parametrize("stored", [None, a_copy(RENAMED), a_copy("scheduler: none")])
def test_a_start_without_last_good_settings_that_fit_says_what_to_do_first(stored):
    with pytest.raises(SettingsError, match="set it back first") as caught:
        started(RENAMED, stored)

    assert f"sharing.resourceName: {NEW} cannot replace {OLD}" in str(caught.value)


def test_last_good_settings_that_the_rows_do_not_allow_do_not_stand_in_for_ones_too_large():
    room = SettingsRoom(start_of(a_plan("sharing: {splitCount: 10000}")))
    room.ledger.set(HELD)
    room.service.recall(a_copy(RENAMED))
    many = Scan("570", tuple(a_gpu(index=n) for n in range(8)))

    assert room.service.saw_gpus(many) is None
    assert room.stop.is_set()
