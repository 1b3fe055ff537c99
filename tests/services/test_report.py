"""A reporter and the Node's view on one fake API server."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import json
import random
from collections.abc import AsyncIterator, Mapping, MutableMapping
from typing import Any, NoReturn

import msgspec
import pytest
import structlog
from typing_extensions import override

from agent.cluster import HANDSHAKE, REGISTER, SCORE, NodeEvent, NodeView
from agent.errors import ApiConflict, ApiError, ApiForbidden, ApiNotFound, ApiThrottled
from agent.hami.annotations import (
    ReportProfile,
    ReportSettings,
    decode_register,
    decode_register_colon,
    encode_json,
    read_register,
    registered,
    report_of,
)
from agent.kit.cell import Cell
from agent.kube.objects import NodeWatch
from agent.model import Condition, Inventory, Link, PciPath
from agent.report import CONFLICT, SPREAD, TICK, ReportCells, Reporter
from agent.sandbox.scheduler.model import COUNT
from agent.sandbox.scheduler.registry import Registry, decode_handshake, read_offer
from agent.sandbox.store import Json
from tests.builders import NODE, a_gpu, a_health, a_shared_gpu, a_uuid, an_inventory
from tests.fakes.apiserver import FakeApi
from tests.fakes.clock import START, LoopClock
from tests.services.at_work import at_work

COLON = ReportSettings(ReportProfile.COLON)
SCORED = ReportSettings(topology_score=True)


class Chance(random.Random):
    """Always the same number between 0 and 1."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self._value = value

    def random(self) -> float:
        return self._value


@dataclasses.dataclass
class Reporting:
    """What a test of the reporter holds in its hands."""

    api: FakeApi
    inventory: Cell[Inventory]
    node: Cell[NodeView | None]
    settings: Cell[ReportSettings]
    reporter: Reporter
    events: list[NodeEvent]
    log: list[MutableMapping[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def unreported(self) -> str:
        """Why the API server does not hold the report, as the reporter says it."""
        return self.reporter.unreported.value

    async def settled(self) -> None:
        """The server holds what the inventory says, and the reporter knows it."""
        async with asyncio.timeout(3600):
            await self.node.until(lambda _: self.told(self.inventory.value))
            await self.reporter.unreported.until(lambda why: not why)

    def told(self, inventory: Inventory) -> bool:
        """The API server holds this inventory."""
        held = {} if self.api.node is None else self.api.node.annotations
        report = report_of(inventory, held, self.settings.value)
        if inventory.gpus:
            return report is not None and not report.changes
        known = read_register(held.get(REGISTER))
        return bool(known) and not any(gpu.healthy for gpu in known)

    def says(self, key: str) -> str | None:
        """What the Node's annotation says at the API server."""
        return None if self.api.node is None else self.api.node.annotations.get(key)

    def written(self, reason: str) -> int:
        """How many writes there were for that reason."""
        return int(dict(self.reporter.writes.items()).get((reason,), 0))


@contextlib.asynccontextmanager
async def reporting(
    api: FakeApi | None = None,
    *,
    inventory: Inventory | None = None,
    settings: ReportSettings | None = None,
    chance: float = 0.0,
    observes: bool = False,
) -> AsyncIterator[Reporting]:
    """Both services run while the block does.

    Without an API server of the test's own the Node is bare.
    """
    if api is None:
        api = FakeApi()
        api.create_node()
    found = Cell(an_inventory() if inventory is None else inventory)
    view: Cell[NodeView | None] = Cell(None)
    events: list[NodeEvent] = []
    node = NodeWatch(api, view, Chance(chance))
    chosen = Cell(ReportSettings() if settings is None else settings)
    cells = ReportCells(found, view, node.returns, chosen)
    clock, dice = LoopClock(), Chance(chance)
    reporter = Reporter(api, cells, node.on_answer, events.append, clock, dice, observes=observes)
    async with at_work(node.run, reporter.run):
        yield Reporting(api, found, view, chosen, reporter, events)


@contextlib.asynccontextmanager
async def reported(
    *, inventory: Inventory | None = None, settings: ReportSettings | None = None
) -> AsyncIterator[Reporting]:
    """A Node that holds the inventory; one write was made."""
    async with reporting(inventory=inventory, settings=settings) as room:
        await room.settled()
        yield room


# The register annotation is written when it must be, and only then, whatever the server answers.


THEIRS = '[{"id":"GPU-theirs","count":1}]'


def ill(inventory: Inventory, index: int = 0) -> Inventory:
    """The same, with one GPU bad."""
    gpus = list(inventory.gpus)
    gpus[index] = msgspec.structs.replace(gpus[index], health=a_health(condition=Condition.BAD))
    return msgspec.structs.replace(inventory, gpus=tuple(gpus), generation=inventory.generation + 1)


def text_of(inventory: Inventory) -> str:
    return encode_json(registered(inventory))


async def test_a_bare_node_gets_the_inventory_and_loses_the_handshake():
    api = FakeApi()
    api.create_node({HANDSHAKE: "Requesting_2026-09-01 12:00:00", "other": "kept"})

    async with reporting(api) as room:
        await room.settled()

    assert api.node is not None
    assert {REGISTER: text_of(an_inventory()), "other": "kept"} == api.node.annotations
    assert 1 == api.writes
    assert ((("inventory",), 1),) == room.reporter.writes.items()


async def test_a_bad_gpu_is_told_without_delay_and_waits_for_no_inventory_change_that_does():
    loop = asyncio.get_running_loop()
    grown = ill(an_inventory(count=3, generation=3))

    async with reporting(chance=0.9) as room:
        await room.settled()
        began = loop.time()
        room.inventory.set(ill(an_inventory()))
        await room.settled()
        assert (began, 1) == (loop.time(), room.written("health"))
        room.inventory.set(grown)
        await asyncio.sleep(0.5)
        assert 2 == room.api.writes
        room.inventory.set(ill(grown, index=1))
        await room.settled()

    assert pytest.approx(began + 0.5) == loop.time()
    assert 3 == room.api.writes


async def test_retry_after_is_respected_by_health_too():
    loop = asyncio.get_running_loop()

    async with reported() as room:
        began = loop.time()
        room.api.fail(ApiThrottled("busy", status=429, retry_after=20), call="annotate_node")
        room.inventory.set(ill(an_inventory()))
        await asyncio.sleep(5)
        room.inventory.set(ill(ill(an_inventory()), index=1))
        await room.settled()

    assert began + 20 == loop.time()


async def test_without_any_gpu_left_the_known_ones_are_told_unhealthy_and_never_an_empty_list():
    async with reported() as room:
        api = room.api
        room.inventory.set(Inventory(generation=2))
        await room.settled()

    assert api.node is not None
    left = decode_register(api.node.annotations[REGISTER])
    assert [False, False] == [gpu.healthy for gpu in left]


@pytest.mark.parametrize(
    ("inventory", "held"),
    [(Inventory(), {REGISTER: text_of(an_inventory())}), (Inventory(generation=1), {})],
    ids=["before the first scan", "a node that never had GPUs"],
)
async def test_without_a_gpu_to_tell_of_nothing_is_written(
    inventory: Inventory, held: dict[str, str]
):
    api = FakeApi()
    api.create_node(held)

    async with reporting(api, inventory=inventory) as room:
        await asyncio.sleep(3600)
        assert "no GPU has been found yet" == room.unreported

    assert 0 == api.writes


@pytest.mark.parametrize(
    "error",
    [
        ApiConflict("conflict", status=409),
        ApiThrottled("too many requests", status=429, retry_after=7),
        ApiForbidden("nodes is forbidden", status=403),
        ApiNotFound("no such Node", status=404),
        ApiError("internal error", status=500),
        ApiError("no answer in time"),
    ],
    ids=["409", "429", "403", "404", "500", "none"],
)
async def test_a_refused_write_is_said_and_tried_again_until_it_is_taken(error: ApiError):
    async with reported() as room:
        room.api.fail(error, count=20, call="annotate_node")
        for second in range(60):  # a change does not end the wait after a failure
            room.inventory.set(an_inventory(count=3, generation=2 + second))
            await asyncio.sleep(1)
        assert room.unreported
        assert str(error) == room.unreported
        tried = room.api.writes
        await room.settled()

        assert room.told(an_inventory(count=3))
        assert tried <= 1 + 1 + 60 / (error.retry_after or 5) + 4
        assert {(str(error.status or "none"),): 20} == dict(room.reporter.failures.items())


async def lost(room: Reporting) -> None:
    """The server is lost, news waits for it, and it is back: the watch tries it 9 s from now."""
    room.api.begin_outage()
    await asyncio.sleep(20)
    room.inventory.set(an_inventory(count=3, generation=2))
    await asyncio.sleep(69)
    room.api.end_outage()


async def test_the_end_of_an_outage_ends_the_wait_of_what_it_held_up():
    async with reported() as room:
        await lost(room)
        room.api.edit_node({"other": "x"})
        await room.node.until(lambda node: node is not None and "other" in node.annotations)
        await asyncio.sleep(SPREAD)

        assert room.told(an_inventory(count=3))


@pytest.mark.parametrize(
    "error",
    [
        ApiThrottled("too many requests", status=429),
        ApiError("not yet", status=503, retry_after=100),
    ],
    ids=["429", "retry-after"],
)
async def test_the_end_of_an_outage_does_not_end_a_wait_that_the_server_asked_for(error: ApiError):
    async with reported() as room:
        room.api.fail(error, count=1000, call="annotate_node")
        room.inventory.set(an_inventory(count=3, generation=2))
        await asyncio.sleep(65)
        tried = room.api.writes
        for _ in range(5):
            room.api.fail(ApiError("connection refused"), call="watch_node")
            room.api.end_watches()
            await asyncio.sleep(4)

        assert room.api.writes <= tried + 1


async def test_a_node_that_was_replaced_while_no_watch_was_open_gets_its_text_at_once():
    async with reported() as room:
        room.api.begin_outage()
        await asyncio.sleep(0.1)
        room.api.delete_node()
        room.api.create_node()
        room.api.end_outage()
        await room.node.until(lambda node: node is not None and node.uid == room.api.node.uid)
        await asyncio.sleep(1)

        assert room.told(an_inventory())
        assert 2 == room.written("inventory")


async def test_a_node_that_is_gone_is_not_written_to_until_it_is_made_anew():
    async with reported() as room:
        tried = room.api.writes
        room.api.delete_node()
        await room.node.until(lambda node: node is None)
        await asyncio.sleep(600)
        assert tried == room.api.writes

        room.api.create_node()
        await room.settled()

        assert tried + 1 == room.api.writes


async def fight(room: Reporting, rounds: int) -> None:
    """The other writer comes back a second after each of our writes."""
    for count in range(rounds):
        room.api.edit_node({REGISTER: THEIRS.replace("1", str(count))})
        await asyncio.sleep(1)


async def test_five_rounds_are_put_right_and_then_one_in_two_minutes():
    async with reported() as room:
        await fight(room, 5)
        assert room.told(an_inventory())
        assert [] == room.events

        await fight(room, 1)
        before = room.api.writes
        await fight(room, 100)
        assert before == room.api.writes
        assert CONFLICT == room.unreported
        (event,) = room.events
        assert ("ReportConflict", CONFLICT, True) == (event.reason, event.text, event.warning)
        assert REGISTER in CONFLICT
        assert "stop the other device plugin" in CONFLICT
        await fight(room, 1200)
        assert before + 9 <= room.api.writes <= before + 11

        await asyncio.sleep(120)
        assert room.told(an_inventory())
        assert not room.unreported


async def test_a_changed_inventory_is_written_at_once_beside_another_writer():
    async with reported() as room:
        await fight(room, 6)
        began = asyncio.get_running_loop().time()
        room.inventory.set(an_inventory(count=3, generation=2))
        await room.settled()
        assert began == asyncio.get_running_loop().time()


async def test_two_agents_on_one_node_do_not_fight_over_the_same_inventory():
    """One lists the GPUs in another order, as HAMi's plugin does at each scan."""
    async with reported() as room:
        text = room.says(REGISTER) or ""
        for _ in range(50):
            first, second = json.loads(room.says(REGISTER) or text)
            turned = [{**second, "devicepairscore": {}}, {**first, "devicepairscore": {}}]
            room.api.edit_node({REGISTER: json.dumps(turned)})
            await asyncio.sleep(30)

        assert 1 == room.api.writes
        assert [] == room.events


# What of the report is asked for: stamps for schedulers up to 2.7.1, and the score annotation.


REQUESTING = "Requesting_2026-08-21 06:20:50"


def stamp(room: Reporting) -> dt.datetime | None:
    """When the last stamp says that it was written."""
    word, written = decode_handshake(room.says(HANDSHAKE) or "")
    assert "Reported" == word
    return written


async def test_the_text_has_records_and_a_stamp_is_written_every_30_seconds_and_nothing_else():
    async with reported(settings=COLON) as room:
        text = room.says(REGISTER) or ""
        assert 2 == len(decode_register_colon(text))
        assert [9, 9, 1] == [len(record.split(",")) for record in text.split(":")]
        assert (START, 1) == (stamp(room), room.api.writes)
        await asyncio.sleep(3601)

        assert 120 == room.written("stamp")
        assert 121 == room.api.writes
        assert START + dt.timedelta(hours=1) == stamp(room)
        assert not room.unreported


async def test_a_request_of_the_scheduler_is_answered_with_the_next_stamp():
    async with reported(settings=COLON) as room:
        await asyncio.sleep(10)
        room.api.edit_node({HANDSHAKE: REQUESTING})
        await asyncio.sleep(19)
        assert REQUESTING == room.says(HANDSHAKE)
        await asyncio.sleep(1 + TICK)

        assert START + dt.timedelta(seconds=30) == stamp(room)


async def test_no_stamp_is_written_while_another_writer_is_left_alone():
    async with reported(settings=COLON) as room:
        for _ in range(6):
            room.api.edit_node({REGISTER: "GPU-theirs,1,1,1,T,0,true,0,:"})
            await asyncio.sleep(1)
        before = room.api.writes
        await asyncio.sleep(100)

        assert before == room.api.writes
        assert CONFLICT == room.unreported


async def test_a_scheduler_that_was_updated_gets_its_text_with_the_changed_setting():
    async with reported(settings=COLON) as room:
        room.settings.set(ReportSettings())
        await room.settled()
        writes = room.api.writes
        await asyncio.sleep(3600)

        assert (room.says(REGISTER) or "").startswith("[{")
        assert room.says(HANDSHAKE) is None
        assert writes == room.api.writes
        room.settings.set(COLON)
        await room.settled()
        assert (room.says(REGISTER) or "").endswith(":")


# The score annotation: beside the register annotation, and only where it is asked for.


def linked(*counts: int, generation: int = 1):
    """One GPU per count; each pair has as many NVLinks as the first of the two tells."""
    gpus = [
        a_gpu(
            index=n,
            links=tuple(
                Link(a_uuid(other), PciPath.SAME_CPU, nvlinks)
                for other in range(len(counts))
                if other != n
            ),
        )
        for n, nvlinks in enumerate(counts)
    ]
    return an_inventory(gpus=[a_shared_gpu(gpu=gpu) for gpu in gpus], generation=generation)


async def test_the_setting_is_taken_over_in_both_directions():
    async with reported(inventory=linked(2, 2)) as room:
        assert room.says(SCORE) is None
        room.settings.set(SCORED)
        await room.settled()
        before = room.says(SCORE)
        assert before is not None
        room.api.edit_node({SCORE: "{}"})
        await room.settled()
        assert (before, 1) == (room.says(SCORE), room.written("foreign"))
        room.settings.set(ReportSettings())
        await room.settled()

        assert room.says(SCORE) is None
        assert 3 == room.written("inventory")


# An agent that observes: its reporter finds its writes done, and the API server sees none.


def told(room: Reporting) -> list[dict]:
    """What the log says would be written."""
    return [line["annotations"] for line in room.log if line["event"] == "observe.would_write"]


@contextlib.asynccontextmanager
async def observing(
    annotations: dict[str, str] | None = None, settings: ReportSettings | None = None
) -> AsyncIterator[Reporting]:
    api = FakeApi()
    api.create_node(annotations)
    with structlog.testing.capture_logs() as log:
        async with reporting(api, settings=settings, observes=True) as room:
            room.log = log
            await asyncio.sleep(5)
            yield room
    assert 0 == api.writes


async def test_every_change_is_told_and_what_is_right_again_is_pending_no_more():
    async with observing(settings=SCORED) as room:
        room.inventory.set(an_inventory(count=3, generation=2))
        await asyncio.sleep(5)

        assert 2 == len(told(room))
        assert {REGISTER, SCORE} == set(told(room)[1])
        assert () == room.reporter.writes.items()
        room.api.edit_node({key: room.reporter.pending[key] for key in (REGISTER, SCORE)})
        await asyncio.sleep(5)
        assert {} == room.reporter.pending


async def test_the_plugin_beside_us_may_write_as_it_likes_and_is_no_adversary():
    async with observing() as room:
        for _ in range(100):
            room.api.edit_node({REGISTER: THEIRS, HANDSHAKE: "Requesting_2026-08-21 06:20:50"})
            await asyncio.sleep(1)
            room.api.edit_node({REGISTER: None})
            await asyncio.sleep(1)

        assert 1 == len(told(room))
        assert [] == room.events
        assert not room.unreported


# A changed inventory reaches the cache of every version of HAMi's scheduler, on virtual time.


INTERVAL, MINUTE = 15.0, dt.timedelta(minutes=1)
KUBELET = 10.0
"""Seconds that a kubelet may take to tell the Node a new count."""

PROFILES = {
    "2.7.1": ReportProfile.COLON,
    "2.8": ReportProfile.JSON,  # it looks at the count of slices alone
    "2.9": ReportProfile.JSON,
    "2.10": ReportProfile.JSON,
}


class OldRegistry(Registry):
    """When a release before 2.10 reads a Node whose agent lives, and when it drops it.

    Source: HAMi v2.7.1 to v2.9 pkg/scheduler/scheduler.go:register, nvidia/device.go:CheckHealth.
    """

    def __init__(self, version: str) -> None:
        super().__init__()
        self._version = version
        self._count = ""

    @override
    def ingest(self, node: Json, now: dt.datetime) -> Mapping[str, str | None]:
        noted, count = node["metadata"]["annotations"], node["status"]["allocatable"][COUNT]
        word, stamp = decode_handshake(noted.get(HANDSHAKE, "Reported"))
        is_asked, is_first = word == "Requesting", self._version == "2.7.1"
        if is_first and is_asked and stamp and now.replace(tzinfo=None) - stamp >= MINUTE:
            self.forget(NODE)
            return {HANDSHAKE: f"Deleted_{now:%Y-%m-%d %H:%M:%S}"}
        asks = not is_asked and self._version != "2.8"
        if asks or (count != self._count and not is_first):
            found = read_offer(noted, is_json=False)
            assert found is not None
            self._nodes[NODE] = found
        self._count = count
        return {HANDSHAKE: f"Requesting_{now:%Y-%m-%d %H:%M:%S}"} if asks else {}


class SkewedScheduler:
    """The model of one version; it looks at the Node every 15 s."""

    def __init__(self, room: Reporting, version: str) -> None:
        self.room = room
        self.registry = Registry() if version == "2.10" else OldRegistry(version)
        self._clock = LoopClock()
        self._allocatable = 0

    async def count(self) -> None:
        async for inventory in self.room.inventory.follow():
            await asyncio.sleep(KUBELET)
            self._allocatable = sum(gpu.split_count for gpu in inventory.gpus if gpu.serving)

    async def look(self) -> NoReturn:
        while True:
            node = self.room.api.node
            assert node is not None
            seen = {
                "metadata": {"name": NODE, "annotations": dict(node.annotations)},
                "status": {"allocatable": {"nvidia.com/gpu": str(self._allocatable)}},
            }
            if writes := self.registry.ingest(seen, self._clock.now()):
                self.room.api.edit_node(writes)
            await asyncio.sleep(INTERVAL)

    def knows(self, inventory: Inventory) -> bool:
        """Its cache says of each GPU what a text of this inventory says."""
        state = self.registry.state(NODE, {})
        report = report_of(inventory, {}, self.room.settings.value)
        assert report is not None
        return state is not None and [*read_register(report.register)] == [
            gpu.capacity for gpu in state.gpus
        ]


@contextlib.asynccontextmanager
async def scheduled(version: str) -> AsyncIterator[SkewedScheduler]:
    """A node that the scheduler knows, just after one of its looks."""
    async with reporting(settings=ReportSettings(PROFILES[version])) as room:
        await room.settled()
        scheduler = SkewedScheduler(room, version)
        async with at_work(scheduler.count, scheduler.look):
            await asyncio.sleep(10 * INTERVAL + 0.01)
            assert scheduler.knows(room.inventory.value)
            yield scheduler


def gpus(*changes: dict[str, object], indexes: tuple[int, ...] = (0, 1)) -> Inventory:
    """GPUs of which the first ones are changed so."""
    found = [a_shared_gpu(gpu=a_gpu(index=index)) for index in indexes]
    for place, change in enumerate(changes):
        found[place] = msgspec.structs.replace(found[place], **change)
    return an_inventory(gpus=found, generation=2)


DOUBLE = 2 * a_shared_gpu().registered_mib
COUNTED = {
    "ill": gpus({"health": a_health(condition=Condition.BAD)}),
    "lost": gpus({"present": False}),
    "grown": gpus(indexes=(0, 1, 2)),
    "split": gpus({"split_count": 4}, {"split_count": 4}),
}
AS_MANY_SLICES = {
    "oversold": gpus({"registered_mib": DOUBLE}, {"registered_mib": DOUBLE}),
    "exchanged": gpus(indexes=(5, 6)),
}


@pytest.mark.parametrize("offset", [0.1, 14.9])
@pytest.mark.parametrize("change", [*COUNTED, *AS_MANY_SLICES])
@pytest.mark.parametrize("version", PROFILES)
async def test_a_changed_inventory_is_in_the_cache_soon(version, change, offset):
    """Within 15 s; 2.8 reads it so long after the kubelet's new count, if that changes."""
    is_counting = version == "2.8"
    if is_counting and change in AS_MANY_SLICES:
        return
    async with scheduled(version) as scheduler:
        await asyncio.sleep(offset)
        changed = (COUNTED | AS_MANY_SLICES)[change]
        scheduler.room.inventory.set(changed)

        await asyncio.sleep(INTERVAL + KUBELET * is_counting)

        assert scheduler.knows(changed)


async def test_an_old_scheduler_never_drops_a_node_whose_agent_lives():
    async with scheduled("2.7.1") as scheduler:
        for _ in range(1200):
            assert scheduler.knows(scheduler.room.inventory.value)
            await asyncio.sleep(1)
