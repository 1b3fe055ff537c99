"""The views of this node's pods and of the Node follow the API server through all that happens."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from agent.allocate.room import GpuUse
from agent.cluster import NodeEvent, NodeView, PodTable, PodView
from agent.errors import ApiError, ApiGone
from agent.inventory import RecentlyRegistered
from agent.kit.cell import Cell
from agent.kit.timing import Tally
from agent.kube.objects import LISTS, LISTS_REFILL, NodeWatch, PodWatch, Reopening
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
from tests.services.at_work import at_work, scenarios

ONE = a_pod(uid=a_pod_uid(1), name="one")
TWO = a_pod(uid=a_pod_uid(2), name="two")


@dataclasses.dataclass
class WatchesRoom:
    """Both watches, and what they show."""

    api: FakeApi
    pods: PodWatch
    node: NodeWatch
    table: Cell[PodTable]
    view: Cell[NodeView | None]
    clock: LoopClock
    noted: list[NodeEvent]
    resource: Cell[str]
    notes: list[NodeView] = dataclasses.field(default_factory=list)
    """What the Node was after each note."""
    group: asyncio.TaskGroup = dataclasses.field(default_factory=asyncio.TaskGroup)
    asking: list[asyncio.Task[PodTable]] = dataclasses.field(default_factory=list)
    turn: int = 0

    @property
    def names(self) -> list[str]:
        return sorted(pod.name for pod in self.table.value.pods.values())


@contextlib.asynccontextmanager
async def following(*pods: PodView, api: FakeApi | None = None) -> AsyncIterator[WatchesRoom]:
    """A bare Node with these pods, which the watches have shown."""
    api = api or FakeApi()
    api.create_node()
    for pod in pods:
        api.put_pod(pod)
    table, view, clock = Cell(PodTable()), Cell[NodeView | None](None), LoopClock()
    noted, resource = [], Cell(RESOURCE)
    watch = PodWatch(api, table, clock, NoChance(), resource, noted.append)
    node = NodeWatch(api, view, NoChance())
    async with at_work(watch.run, node.run):
        await asyncio.sleep(0.1)
        yield WatchesRoom(api, watch, node, table, view, clock, noted, resource)


async def test_pods_are_counted_by_another_name_without_asking_the_api_server():
    def counted() -> list[str]:
        return [pod.name for pod in room.table.value.pods.values() if pod.gpu_containers]

    new = "example.com/vgpu"
    other = msgspec.structs.replace(TWO, containers=(a_container(resource=new),))
    async with following(ONE, other) as room:
        assert ["one"] == counted()
        room.resource.set(new)
        await asyncio.sleep(0.1)
        assert ["two"] == counted()
        room.api.delete_pod(*TWO.key)
        await asyncio.sleep(0.1)

        (grave,) = room.table.value.tombstones
        assert [new] == [one.resource for one in grave.pod.gpu_containers]
        assert ([], 1) == (counted(), room.api.calls["list_pods"])


async def do(room: WatchesRoom, word: str) -> None:
    """`+5`: 5 s pass. `put=one`, `mark=one`, `note`: somebody writes a pod, on a pod, on the Node.

    `refresh=10`: so many ask for a LIST; `refresh`: one, which is waited for. `look`, `read`: a GET
    of pod one, of the Node. `answered`: the last note was the agent's; `answered-late`: the one
    before it. `lag=5`: frames of the watches come so late; `way_back=1`: so do LISTs.
    """
    verb, _, what = word.partition("=")
    api, pod, room.turn = room.api, {"two": TWO}.get(what, ONE), room.turn + 1
    if word.startswith("+"):
        await asyncio.sleep(float(word))
    elif word in ("refresh", "look", "read"):
        looks: dict[str, Callable[[], Awaitable[object]]] = {
            "refresh": room.pods.refresh,
            "read": room.node.refresh,
        }
        await (looks[word]() if word in looks else room.pods.find_uid(*ONE.key))
    elif verb == "refresh":
        room.asking += [room.group.create_task(room.pods.refresh()) for _ in range(int(what))]
    elif verb == "note":
        room.notes.append(api.edit_node({"n": str(room.turn)}))
    elif verb == "answered":
        room.node.on_answer(room.notes[-1])
    elif verb == "answered-late":
        room.node.on_answer(room.notes[-2])
    elif verb == "restore":
        api.node = room.notes[0]
    elif hasattr(api, verb):
        setattr(api, verb, float(what))
    else:
        deeds: dict[str, Callable[[], object]] = {
            "put": lambda: api.put_pod(pod),
            "mark": lambda: api.edit_pod(*pod.key, {"n": str(room.turn)}),
            "delete": lambda: api.delete_pod(*pod.key),
            "down": api.begin_outage,
            "up": api.end_outage,
            "forget": api.forget_history,
            "end": api.end_watches,
            "no-node": api.delete_node,
            "a-node": api.create_node,
            "clock-back": lambda: room.clock.step(dt.timedelta(days=-1)),
        }
        deeds[verb]()


def told(room: WatchesRoom) -> str:
    """The pods and the Node as the watches show them, and what that took."""
    table, node, calls = room.table.value, room.view.value, room.api.calls
    pods = [f"{pod.name}{pod.annotations.get('n', '')}" for pod in table.pods.values()]
    graves = [f"{grave.pod.name} is buried" for grave in table.tombstones]
    parts = [" ".join(sorted(pods)) or "no pod", *graves, *["stale"] * table.stale]
    parts.append(f"node {node.annotations.get('n', 'bare')}" if node else "no node")
    is_newest = node == room.api.node
    parts += ["not the newest"] * (not is_newest)
    parts.append(f"lists {calls['list_pods']}, watches {calls['watch_pods']} {calls['watch_node']}")
    parts += ["gone"] * (("gone",) in dict(room.pods.restarts.items()))
    parts += [f"asked by {len(room.asking)}"] * bool(room.asking)
    return " | ".join([*parts, *(f"{one.reason}: {one.text}" for one in room.noted)])


SCENARIOS = scenarios("watches_scenarios.txt")


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_the_watches_show_what_is_told(scenario):
    async with following() as room:
        async with asyncio.TaskGroup() as room.group:
            for word in scenario.split():
                await do(room, word)
        assert all(one.result().synced for one in room.asking)
        assert SCENARIOS[scenario] == told(room)


async def test_a_watch_that_breaks_at_the_same_place_again_and_again_gives_way_to_a_list():
    class Poisoned(FakeApi):
        async def watch_pods(self, resource_version):
            async for change in super().watch_pods(resource_version):
                yield change
                if resource_version == "3":
                    raise ApiError("a frame is longer than 8 MiB")

    async with following(ONE, api=Poisoned()) as room:
        room.api.put_pod(TWO)
        await asyncio.sleep(120)

        assert (["one", "two"], False) == (room.names, room.table.value.stale)
        assert 2 == room.api.calls["list_pods"]


# One LIST on demand: as new as the question, shared by those who ask at the same time.


@pytest.mark.parametrize("said", ["refused", "out of time"])
async def test_a_list_that_fails_or_takes_too_long_is_told_to_who_asked(said: str):
    async with following() as room:
        if said == "refused":
            room.api.fail(ApiError("refused"), call="list_pods")
        else:
            room.api.delay = 60
        with pytest.raises(ApiError, match=said):
            await room.pods.refresh()
        room.api.delay = 0

        assert (await room.pods.refresh()).synced


async def test_however_many_ask_the_lists_of_a_minute_are_bounded():
    refused = 0
    async with following() as room:
        for _ in range(600):
            try:
                await room.pods.refresh()
            except ApiError:
                refused += 1
            await asyncio.sleep(0.15)

    made = room.api.calls["list_pods"] - 1
    assert 600 == made + refused
    assert LISTS <= made <= LISTS + 600 * 0.15 / LISTS_REFILL + 1


async def test_however_many_unknown_pods_have_asked_the_locks_owner_has_its_list():
    async with following() as room:
        for is_owners in (False, True):
            for _ in range(LISTS):
                assert (await room.pods.refresh(is_owners=is_owners)).synced
            with pytest.raises(ApiError, match="too many"):
                await room.pods.refresh(is_owners=is_owners)


async def test_a_list_that_a_defect_cut_off_is_an_error_of_the_api_server():
    class Defective(FakeApi):
        async def watch_pods(self, resource_version):
            yield await anext(super().watch_pods(resource_version))
            await asyncio.sleep(0.5)
            raise ValueError("a defect")

    api, table = Defective(), Cell(PodTable())
    pods = PodWatch(api, table, LoopClock(), NoChance(), Cell(RESOURCE))

    async def follow():
        with pytest.raises(ExceptionGroup):
            await pods.run()

    async with asyncio.TaskGroup() as group:
        group.create_task(follow())
        await table.until(lambda table: table.synced)
        api.way_back = 1.0
        with pytest.raises(ApiError, match="given up"):
            await pods.refresh()


# The Node's view never goes back behind the agent's own writes.


async def test_a_read_that_found_no_node_takes_back_none_that_the_watch_showed_meanwhile(
    monkeypatch,
):
    async with following() as room:

        async def found_none() -> None:
            room.api.edit_node({"a": "1"})
            await asyncio.sleep(1)

        monkeypatch.setattr(room.api, "get_node", found_none)
        await room.node.refresh()

        assert room.api.node == room.view.value


async def test_a_watch_that_breaks_at_once_says_nothing_of_the_node():
    class BreakingWatch(FakeApi):
        async def watch_node(self):
            async for change in super().watch_node():
                if self.calls["watch_node"] > 1:
                    raise ApiError("reset")
                yield change

    async with following(api=BreakingWatch()) as room:
        room.api.end_watches()
        await asyncio.sleep(200)

        assert room.api.node == room.view.value


# What was registered stays allocatable for a minute, to the greater of both amounts.


async def test_a_lowered_amount_still_counts_for_a_minute_each_amount_by_itself() -> None:
    def of(mib: int, core_percent: int) -> Inventory:
        gpu = a_shared_gpu(registered_mib=mib, core_percent=core_percent)
        return an_inventory(gpus=(gpu,))

    cell, uuid = Cell(of(2000, 50)), a_gpu().uuid
    recent = RecentlyRegistered(cell)
    async with at_work(recent.run):
        await asyncio.sleep(0)
        cell.set(of(1000, 100))
        await asyncio.sleep(59)
        assert recent.greatest() == {uuid: GpuUse(2000, 100)}
        await asyncio.sleep(2)
        assert recent.greatest() == {uuid: GpuUse(1000, 100)}


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
