"""The Node's view follows the watch, and never goes back behind our own writes."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from agent.allocate.room import GpuUse
from agent.cluster import NodeView
from agent.errors import ApiError, ApiGone
from agent.hami.annotations import former_locks
from agent.inventory import RecentlyRegistered
from agent.kit.cell import Cell
from agent.kit.timing import Tally
from agent.kube.objects import NodeWatch, Reopening
from agent.model import Inventory
from tests.builders import a_gpu, a_shared_gpu, an_inventory
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import NoChance
from tests.services.at_work import at_work


@contextlib.asynccontextmanager
async def following(
    api: FakeApi | None = None,
) -> AsyncIterator[tuple[FakeApi, NodeWatch, Cell[NodeView | None]]]:
    """A watch of the API server's Node; of a bare one unless another is given."""
    if api is None:
        api = FakeApi()
        api.create_node()
    view: Cell[NodeView | None] = Cell(None)
    node = NodeWatch(api, view, NoChance())
    async with at_work(node.run):
        await asyncio.sleep(0.1)
        yield api, node, view


async def test_our_own_write_is_seen_before_the_watch_shows_it():
    async with following() as (api, node, view):
        api.lag = 5.0
        late = api.edit_node({"a": "1"})
        answer = api.edit_node({"a": "2"})
        node.on_answer(answer)
        assert answer == view.value
        await asyncio.sleep(6)
        assert late != view.value
        await asyncio.sleep(6)

        assert answer == view.value


async def test_an_answer_that_comes_after_the_watch_showed_more_takes_nothing_back():
    async with following() as (api, node, view):
        answer, newest = (api.edit_node({"a": text}) for text in "12")
        await asyncio.sleep(0.1)
        node.on_answer(answer)

        assert newest == view.value


async def test_a_server_that_was_restored_from_a_backup_is_believed():
    old = FakeApi()
    old.create_node({"restored": "yes"})

    async with following() as (api, node, view):
        for number in range(10):
            api.edit_node({"a": str(number)})
        node.on_answer(api.edit_node({"a": "ours"}))
        assert old.node is not None
        api.node = msgspec.structs.replace(old.node, uid="node-uid-1")
        api.end_watches()
        await asyncio.sleep(5)

        assert view.value == api.node


async def test_a_day_without_a_server_costs_few_tries_and_ends_by_itself():
    async with following() as (api, _, view):
        api.begin_outage()
        await asyncio.sleep(86_400)
        tries = api.calls["watch_node"]
        changed = api.edit_node({"a": "b"})
        api.end_outage()
        await asyncio.sleep(60)

        assert changed == view.value

    assert 86_400 / 45 <= tries <= 86_400 / 30 + 10


async def test_a_node_deleted_while_the_watch_was_down_leaves_the_view():
    async with following() as (api, _, view):
        api.begin_outage()
        await asyncio.sleep(0.1)
        api.delete_node()
        api.end_outage()
        await asyncio.sleep(4)
        assert view.value is not None
        await asyncio.sleep(60)  # the first bookmark comes before a Node
        assert view.value is None
        created = api.create_node()
        await asyncio.sleep(0.1)

        assert created == view.value


async def test_a_read_that_found_no_node_takes_back_none_that_the_watch_showed_meanwhile(
    monkeypatch,
):
    async with following() as (api, node, view):

        async def found_none() -> None:
            api.edit_node({"a": "1"})
            await asyncio.sleep(1)

        monkeypatch.setattr(api, "get_node", found_none)
        await node.refresh()

        assert api.node == view.value


async def test_a_read_that_finds_no_node_empties_the_view_before_a_watch_can_say_so():
    async with following() as (api, node, view):
        api.begin_outage()
        await asyncio.sleep(0.1)
        api.delete_node()
        api.end_outage()
        assert view.value is not None

        await node.refresh()

        assert view.value is None
        created = api.create_node()
        await asyncio.sleep(60)
        assert created == view.value


class BreakingWatch(FakeApi):
    """From the second watch on each breaks before it could show the Node."""

    async def watch_node(self):
        async for change in super().watch_node():
            if self.calls["watch_node"] > 1:
                raise ApiError("reset")
            yield change


@pytest.mark.parametrize("breaks", [False, True], ids=["it does not open", "it breaks at once"])
async def test_a_watch_that_shows_nothing_says_nothing_of_the_node(breaks):
    api = BreakingWatch() if breaks else FakeApi()
    node = api.create_node()

    async with following(api) as (_, _, view):
        if breaks:
            api.end_watches()
        else:
            api.begin_outage()
            await asyncio.sleep(0.1)
            api.end_outage()
            api.delay = 300.0
        await asyncio.sleep(200)

        assert node == view.value


LOCK = "hami.io/mutex.lock"


def went(view: Cell[NodeView | None]) -> list[str]:
    """The owners of the locks that went and still prove a right."""
    return [lock.name for lock in former_locks(view.value, asyncio.get_running_loop().time())]


async def test_locks_that_went_are_remembered_for_a_minute_the_last_one_first():
    async with following() as (api, _, view):
        for name in ("a", "b"):
            api.edit_node({LOCK: f"2026-09-01T12:00:00Z,team-a,{name}"})
            await asyncio.sleep(1)
        assert ["a"] == went(view)
        api.edit_node({LOCK: None, "other": "change"})
        await asyncio.sleep(50)
        assert ["b", "a"] == went(view)

        await asyncio.sleep(9.5)
        assert ["b"] == went(view)
        await asyncio.sleep(2)
        assert [] == went(view)


# What was registered stays sellable for a minute, to the greater of both amounts.


GPU = a_gpu()


def of(mib: int, core_percent: int = 100) -> Inventory:
    return an_inventory(
        gpus=(a_shared_gpu(gpu=GPU, registered_mib=mib, core_percent=core_percent),)
    )


@asynccontextmanager
async def remembering(cell: Cell[Inventory]) -> AsyncIterator[RecentlyRegistered]:
    recent = RecentlyRegistered(cell)
    async with at_work(recent.run):
        await asyncio.sleep(0)
        yield recent


async def test_a_lowered_amount_still_counts_for_a_minute_each_amount_by_itself() -> None:
    cell = Cell(of(2000, 50))
    async with remembering(cell) as recent:
        cell.set(of(1000, 100))
        await asyncio.sleep(59)
        assert recent.greatest() == {GPU.uuid: GpuUse(2000, 100)}
        await asyncio.sleep(2)
        assert recent.greatest() == {GPU.uuid: GpuUse(1000, 100)}


# When a watch is opened again, in seconds.


class AlwaysMost(NoChance):
    """The longest that chance allows."""

    def uniform(self, a: float, b: float) -> float:
        """The upper end."""
        del a
        return b


BROKE, GONE = ApiError("broke"), ApiGone("gone")
LATER, SOON = ApiError("later", retry_after=100), ApiError("soon", retry_after=0.5)


@pytest.mark.parametrize(
    ("chance", "steps", "failures"),
    [
        # One that lasted as long as it was asked for is followed by the next at once.
        (AlwaysMost(), [(None, 300, 0)], 0),
        # Clients whose watches a server ends or breaks at once come back within 4 s.
        (AlwaysMost(), [(None, 299, 4)], 1),
        (AlwaysMost(), [(BROKE, 299, 4)], 1),
        (NoChance(), [(BROKE, 299, 0)], 1),
        (NoChance(), [(GONE, 299, 0)], 1),
        # Behind a proxy that ends each watch after some seconds the views stay as new as they can.
        (NoChance(), [(None, 20, 0), (None, 20, 0), (None, 20, 0)], 3),
        # One that ends at once, or breaks, waits longer each time.
        (NoChance(), [(None, 0, delay) for delay in (0, 1, 2, 5, 10, 20, 30, 30)], 8),
        (NoChance(), [(BROKE, 0, delay) for delay in (0, 1, 2)], 3),
        # The server may ask for more time, but not for less.
        (NoChance(), [(LATER, 0, 100), (SOON, 0, 1)], 2),
        (AlwaysMost(), [(LATER, 0, 104)], 1),
        # Half a minute clears the memory and less does not.
        (NoChance(), [(BROKE, 0, 0), (BROKE, 0, 1), (BROKE, 29, 2)], 3),
        (NoChance(), [(BROKE, 0, 0), (BROKE, 0, 1), (BROKE, 30, 0)], 1),
        (NoChance(), [(GONE, 0, 0), (GONE, 0, 1), (GONE, 0, 2), (GONE, 30, 0)], 1),
    ],
)
def test_the_next_watch_is_opened_after(chance, steps, failures):
    watch = Reopening(Tally("over_total", "Watches that were over.", ("reason",)), chance)

    assert [delay for *_, delay in steps] == [watch.delay(*step) for *step, _ in steps]
    assert failures == watch.failures
    reasons = Counter({None: "ended", GONE: "gone"}.get(one, "error") for one, *_ in steps)
    assert {(reason,): count for reason, count in reasons.items()} == dict(watch.restarts.items())
