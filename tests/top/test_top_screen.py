"""The live screen, where the extra `cli` is installed: content, keys, a source that fails."""

import datetime as dt

import msgspec
import pytest
from textual.widgets import DataTable, Input, Static

from agent.cli.main import Unreachable
from agent.cli.status import StatusRead
from agent.cli.top_screen import TopScreen
from agent.status import AllocationStatus, GpuStatus, NodeStatus, ShareStatus, StatusDocument

pytestmark = pytest.mark.looptime(False)

NOON = dt.datetime(2026, 9, 1, 12, 0, 0, tzinfo=dt.UTC)
GPUS = (
    GpuStatus(uuid="GPU-a", index=0, condition="ok", slices=10, sellable_mib=2048, gpu_percent=50),
    GpuStatus(uuid="GPU-b", index=1, condition="bad", serving=False, text="XID 79 [H-079]"),
)


def held(namespace: str, pod: str, cores: int) -> AllocationStatus:
    share = ShareStatus(gpu="0", uuid="GPU-a", memory_mib=1024, cores=cores)
    return AllocationStatus(
        namespace=namespace, pod=pod, container="main", shares=(share,), since=NOON, confirmed=True
    )


FOUND = StatusDocument(
    node=NodeStatus(name="gpu-a07", ready=True),
    gpus=GPUS,
    allocations=(held("b", "one", 10), held("a", "two", 90), held("a", "x\x1b[2J", 20)),
)


def a_screen(read=None, found=FOUND, **options):
    first = StatusRead(found, NOON, "/run/x")
    return TopScreen(read or (lambda: first), first, interval=3600, **options)


def cells(app):
    rows = app.query_one(DataTable)
    return [list(rows.get_row_at(number)) for number in range(rows.row_count)]


async def test_the_screen_shows_the_gpus_and_who_holds_them():
    async with (app := a_screen()).run_test(size=(120, 40)):
        text = str(app.query_one("#node", Static).content)
        assert any(line.split()[:3] == ["0", "-", "ok"] for line in text.splitlines())
        assert [["a", "two"], ["b", "one"]] == [row[:2] for row in cells(app) if "x" not in row[1]]
        assert "\x1b" not in str(cells(app))
        assert "XID 79 [H-079]" in text


async def test_a_filter_keeps_what_matches_and_escape_ends_it():
    async with (app := a_screen()).run_test(size=(120, 40)) as pilot:
        await pilot.press("slash", *"two", "enter")
        assert [["a", "two"]] == [row[:2] for row in cells(app)]
        assert not app.query_one(Input).has_focus
        await pilot.press("escape")
        assert 3 == len(cells(app))


async def test_s_sorts_by_the_next_column_and_q_leaves():
    async with (app := a_screen(plain=True)).run_test(size=(120, 40)) as pilot:
        await pilot.press("s")
        assert ["one", "two"] == [row[1] for row in cells(app)][:2]
        assert str(app.query_one("#node", Static).content).isascii()
        await pilot.press("q")
    assert app.return_code == 0


async def test_new_values_replace_the_old_ones_and_the_cursor_stays():
    later = msgspec.structs.replace(FOUND, allocations=(held("a", "two", 5), held("c", "new", 1)))
    read = StatusRead(later, NOON, "/run/x")
    async with (app := a_screen(lambda: read)).run_test(size=(120, 40)) as pilot:
        await pilot.press("down")
        app.look()
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert ["two", "new"] == [row[1] for row in cells(app)]
        assert 1 == app.query_one(DataTable).cursor_row


async def test_when_the_source_fails_the_last_values_stay_and_their_age_is_said():
    answers = [Unreachable("/run/x does not answer"), None]

    def read():
        error = answers.pop(0)
        if error is not None:
            raise error
        return msgspec.structs.replace(StatusRead(FOUND, NOON, "/run/x"))

    async with (app := a_screen(read)).run_test(size=(120, 40)) as pilot:
        for shown in (True, False):
            app.look()
            await app.workers.wait_for_complete()
            await pilot.pause()
            trouble = app.query_one("#trouble", Static)
            assert shown == trouble.display
        assert "the values are of 12:00:00 UTC: /run/x does not answer" == str(trouble.content)
        assert 3 == len(cells(app))
