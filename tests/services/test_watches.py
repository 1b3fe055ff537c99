"""The table of this node's pods follows the API server through everything that happens to it."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from agent.allocate.room import GpuUse
from agent.cluster import NodeEvent, NodeView, PodTable
from agent.errors import ApiError, ApiGone
from agent.hami.annotations import former_locks
from agent.inventory import RecentlyRegistered
from agent.kit.cell import Cell
from agent.kit.timing import Tally
from agent.kube.objects import KEEP, LISTS, LISTS_REFILL, NodeWatch, PodWatch, Reopening
from agent.model import Inventory
from tests.builders import (
    RESOURCE,
    a_container,
    a_gpu,
    a_pod,
    a_pod_uid,
    a_shared_gpu,
    an_inventory,
)
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import NoChance
from tests.fakes.clock import LoopClock
from tests.services.at_work import at_work

ONE = a_pod(uid=a_pod_uid(1), name="one")
TWO = a_pod(uid=a_pod_uid(2), name="two")


@dataclasses.dataclass
class PodsRoom:
    pods: PodWatch
    table: Cell[PodTable]
    clock: LoopClock
    noted: list[NodeEvent]

    @property
    def names(self) -> list[str]:
        return sorted(pod.name for pod in self.table.value.pods.values())

    @property
    def graves(self) -> list[str]:
        return sorted(grave.pod.name for grave in self.table.value.tombstones)


@contextlib.asynccontextmanager
async def following_pods(api: FakeApi, *, settle: float = 0.1) -> AsyncIterator[PodsRoom]:
    table, clock, noted = Cell(PodTable()), LoopClock(), []
    pods = PodWatch(api, table, clock, NoChance(), Cell(RESOURCE), noted.append)
    async with at_work(pods.run):
        await asyncio.sleep(settle)
        yield PodsRoom(pods, table, clock, noted)


@contextlib.asynccontextmanager
async def following_one() -> AsyncIterator[tuple[FakeApi, PodsRoom]]:
    """The same, of a node with one pod."""
    api = FakeApi()
    api.put_pod(ONE)
    async with following_pods(api) as room:
        yield api, room


async def test_pods_are_counted_by_another_name_without_asking_the_api_server():
    old, new = "nvidia.com/gpu", "example.com/vgpu"
    api, resource = FakeApi(), Cell(old)
    api.put_pod(msgspec.structs.replace(ONE, containers=(a_container(resource=old),)))
    api.put_pod(msgspec.structs.replace(TWO, containers=(a_container(resource=new),)))
    table: Cell[PodTable] = Cell(PodTable())
    pods = PodWatch(api, table, LoopClock(), NoChance(), resource)

    def counted() -> list[str]:
        return [pod.name for pod in table.value.pods.values() if pod.gpu_containers]

    async with at_work(pods.run):
        await asyncio.sleep(0.1)
        assert ["one"] == counted()
        resource.set(new)
        await asyncio.sleep(0.1)
        assert ["two"] == counted()
        api.put_pod(a_pod(uid=a_pod_uid(3), name="three", containers=(a_container(resource=new),)))
        api.delete_pod(TWO.namespace, "two")
        await asyncio.sleep(0.1)

    assert ["three"] == counted()
    assert [new] == [one.resource for one in table.value.tombstones[0].pod.gpu_containers]
    assert 1 == api.calls["list_pods"]


async def test_a_pod_deleted_before_the_clock_was_set_back_is_kept_no_longer_for_that():
    async with following_one() as (api, room):
        api.delete_pod(*ONE.key)
        await asyncio.sleep(0.1)
        room.clock.step(dt.timedelta(days=-1))
        api.put_pod(TWO)
        await asyncio.sleep(KEEP.total_seconds())
        assert ["one"] == room.graves
        api.edit_pod(*TWO.key, {"step": "1"})
        await asyncio.sleep(0.1)

        assert [] == room.graves


async def test_a_frame_older_than_a_look_does_not_take_back_what_the_look_saw():
    async with following_one() as (api, room):
        api.lag = 1.0
        api.edit_pod(*ONE.key, {"step": "1"})
        await asyncio.sleep(0.5)
        api.edit_pod(*ONE.key, {"step": "2"})

        assert ONE.uid == await room.pods.find_uid(*ONE.key)
        for _ in range(3):
            assert "2" == room.table.value.pods[ONE.uid].annotations["step"]
            await asyncio.sleep(0.6)


async def test_a_list_from_before_what_the_watch_showed_takes_nothing_back():
    class LateApi(FakeApi):
        async def list_pods(self):
            found = await super().list_pods()
            await asyncio.sleep(1)
            return found

    api = LateApi()
    async with following_pods(api, settle=2) as room, asyncio.TaskGroup() as group:
        group.create_task(room.pods.refresh())
        await asyncio.sleep(0.5)
        api.put_pod(ONE)
        await asyncio.sleep(1)

        assert ["one"] == room.names


async def test_a_forgotten_position_is_listed_again_and_the_missing_are_buried():
    async with following_one() as (api, room):
        await asyncio.sleep(10)
        api.begin_outage()
        await asyncio.sleep(1)
        api.delete_pod(*ONE.key)
        api.put_pod(TWO)
        api.forget_history()
        api.end_outage()
        await asyncio.sleep(10)

        assert ["two"] == room.names
        assert ["one"] == room.graves
        assert not room.table.value.stale
        assert (("gone",), 1) in room.pods.restarts.items()


async def test_an_outage_is_shown_and_the_old_pods_stay():
    async with following_one() as (api, room):
        await asyncio.sleep(60)
        api.begin_outage()
        await asyncio.sleep(86_400)
        assert room.table.value.stale
        assert ["one"] == room.names
        api.put_pod(TWO)
        api.end_outage()
        await asyncio.sleep(60)

        assert not room.table.value.stale
        assert ["one", "two"] == room.names
        (noted,) = room.noted
        assert ("ApiServerAway", True) == (noted.reason, noted.warning)
        assert re.match(r"the API server could not be followed from .* to .* UTC: ", noted.text)

        api.begin_outage()
        await asyncio.sleep(5)
        api.end_outage()
        await asyncio.sleep(60)
        assert [noted] == room.noted

    assert api.calls["watch_pods"] + api.calls["list_pods"] <= 86_400 / 30 + 20


async def test_a_watch_that_breaks_at_the_same_place_again_and_again_gives_way_to_a_list():
    class Poisoned(FakeApi):
        async def watch_pods(self, resource_version):
            async for change in super().watch_pods(resource_version):
                yield change
                if resource_version == "2":
                    raise ApiError("a frame is longer than 8 MiB")

    api = Poisoned()
    api.put_pod(ONE)

    async with following_pods(api) as room:
        api.put_pod(TWO)
        await asyncio.sleep(120)

        assert ["one", "two"] == room.names
        assert not room.table.value.stale

    assert 2 == api.calls["list_pods"]


async def test_late_frames_do_not_undo_a_refresh():
    api = FakeApi()
    api.put_pod(ONE)

    async with following_pods(api) as room:
        api.lag = 10
        api.put_pod(TWO)
        api.delete_pod(*TWO.key)
        await room.pods.refresh()
        seen = []
        for _ in range(30):
            await asyncio.sleep(1)
            seen.append(room.names)
        api.put_pod(TWO)
        await asyncio.sleep(11)

        assert [["one"]] * 30 == seen
        assert ["one", "two"] == room.names


async def test_those_who_ask_together_share_one_list():
    async with following_pods(api := FakeApi()) as room:
        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(room.pods.refresh())

        assert 2 == api.calls["list_pods"]


# One LIST on demand: as new as the question, shared by those who ask at the same time.


async def test_who_asks_during_a_list_waits_for_the_next_one():
    async with following_pods(api := FakeApi()) as room:
        api.delay = 0.8
        async with asyncio.TaskGroup() as group:
            group.create_task(room.pods.refresh())
            await asyncio.sleep(0.4)
            api.put_pod(ONE)
            second = group.create_task(room.pods.refresh())

        assert ONE.uid in second.result().pods
        assert 3 == api.calls["list_pods"]


@pytest.mark.parametrize(
    ("fault", "said"), [(ApiError("refused"), "refused"), (None, "out of time")], ids=str
)
async def test_a_list_that_fails_or_takes_too_long_is_told_to_who_asked(
    fault: ApiError | None, said: str
):
    async with following_pods(api := FakeApi()) as room:
        if fault is not None:
            api.fail(fault, call="list_pods")
        else:
            api.delay = 60
        with pytest.raises(ApiError, match=said):
            await room.pods.refresh()
        api.delay = 0

        assert (await room.pods.refresh()).synced


async def test_however_many_ask_the_lists_of_a_minute_are_bounded():
    api = FakeApi()
    refused = 0

    async with following_pods(api) as room:
        before, began = api.calls["list_pods"], asyncio.get_running_loop().time()
        for _ in range(600):
            try:
                await room.pods.refresh()
            except ApiError:
                refused += 1
            await asyncio.sleep(0.15)

        seconds = asyncio.get_running_loop().time() - began

    made = api.calls["list_pods"] - before
    assert 600 == made + refused
    assert LISTS <= made <= LISTS + seconds / LISTS_REFILL + 1


async def test_however_many_unknown_pods_have_asked_the_locks_owner_has_its_list():
    async with following_pods(FakeApi()) as room:
        for _ in range(LISTS):
            await room.pods.refresh()
        with pytest.raises(ApiError, match="too many"):
            await room.pods.refresh()

        for _ in range(LISTS):
            assert (await room.pods.refresh(is_owners=True)).synced
        with pytest.raises(ApiError, match="too many"):
            await room.pods.refresh(is_owners=True)


async def test_a_list_that_a_defect_cut_off_is_an_error_of_the_api_server():
    class Defective(FakeApi):
        async def list_pods(self):
            if self.calls["list_pods"]:
                await asyncio.sleep(1)
            return await super().list_pods()

        async def watch_pods(self, resource_version):
            yield await anext(super().watch_pods(resource_version))
            await asyncio.sleep(0.5)
            raise ValueError("a defect")

    table = Cell(PodTable())
    pods = PodWatch(Defective(), table, LoopClock(), NoChance(), Cell(RESOURCE))

    async def follow():
        with pytest.raises(ExceptionGroup):
            await pods.run()

    async with asyncio.TaskGroup() as group:
        group.create_task(follow())
        await table.until(lambda table: table.synced)
        with pytest.raises(ApiError, match="given up"):
            await pods.refresh()


# The Node's view follows the watch, and never goes back behind our own writes.


@contextlib.asynccontextmanager
async def following_node(
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
    async with following_node() as (api, node, view):
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
    async with following_node() as (api, node, view):
        answer, newest = (api.edit_node({"a": text}) for text in "12")
        await asyncio.sleep(0.1)
        node.on_answer(answer)

        assert newest == view.value


async def test_a_server_that_was_restored_from_a_backup_is_believed():
    old = FakeApi()
    old.create_node({"restored": "yes"})

    async with following_node() as (api, node, view):
        for number in range(10):
            api.edit_node({"a": str(number)})
        node.on_answer(api.edit_node({"a": "ours"}))
        assert old.node is not None
        api.node = msgspec.structs.replace(old.node, uid="node-uid-1")
        api.end_watches()
        await asyncio.sleep(5)

        assert view.value == api.node


async def test_a_day_without_a_server_costs_few_tries_and_ends_by_itself():
    async with following_node() as (api, _, view):
        api.begin_outage()
        await asyncio.sleep(86_400)
        tries = api.calls["watch_node"]
        changed = api.edit_node({"a": "b"})
        api.end_outage()
        await asyncio.sleep(60)

        assert changed == view.value

    assert 86_400 / 45 <= tries <= 86_400 / 30 + 10


async def test_a_node_deleted_while_the_watch_was_down_leaves_the_view():
    async with following_node() as (api, _, view):
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
    async with following_node() as (api, node, view):

        async def found_none() -> None:
            api.edit_node({"a": "1"})
            await asyncio.sleep(1)

        monkeypatch.setattr(api, "get_node", found_none)
        await node.refresh()

        assert api.node == view.value


async def test_a_read_that_finds_no_node_empties_the_view_before_a_watch_can_say_so():
    async with following_node() as (api, node, view):
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

    async with following_node(api) as (_, _, view):
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
    async with following_node() as (api, _, view):
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
