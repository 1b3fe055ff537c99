"""A reporter and the Node's view on one fake API server."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NoReturn

import msgspec
import pytest
import structlog
from typing_extensions import override

from agent.cluster import HANDSHAKE, REGISTER, SCORE, NodeEvent, NodeView
from agent.errors import ApiConflict, ApiError, ApiForbidden, ApiNotFound, ApiThrottled
from agent.hami.annotations import (
    ReportProfile,
    ReportSettings,
    decode_register_colon,
    encode_json,
    read_register,
    registered,
    report_of,
)
from agent.kit.cell import Cell
from agent.kit.timing import loop_time
from agent.kube.objects import NodeWatch
from agent.model import Condition, Inventory, Link, PciPath
from agent.report import CONFLICT, TICK, ReportCells, Reporter
from agent.sandbox.scheduler.model import COUNT
from agent.sandbox.scheduler.registry import Registry, decode_handshake, read_offer
from agent.sandbox.store import Json
from tests.builders import NODE, a_gpu, a_health, a_shared_gpu, a_uuid, an_inventory
from tests.fakes.apiserver import FakeApi
from tests.fakes.clock import START, LoopClock
from tests.services.at_work import at_work, scenarios

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
    began: float = dataclasses.field(default_factory=loop_time)
    moments: list[str] = dataclasses.field(default_factory=list)
    """When it was settled."""

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
    held: Mapping[str, str] | None = None,
    *,
    inventory: Inventory | None = None,
    settings: ReportSettings | None = None,
    chance: float = 0.0,
    observes: bool = False,
) -> AsyncIterator[Reporting]:
    """Reporter and Node watch run while the block does; the Node holds these annotations."""
    api = FakeApi()
    api.create_node(held)
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
async def reported(settings: ReportSettings | None = None) -> AsyncIterator[Reporting]:
    """A Node that holds the inventory; one write was made."""
    async with reporting(settings=settings) as room:
        await room.settled()
        yield room


THEIRS = '[{"id":"GPU-theirs","count":{}}]'


def of(what: str) -> Inventory:
    """`3`: three GPUs; `3:0,2`: of which those are ill."""
    count, _, ill = what.partition(":")
    healths = {int(index): a_health(condition=Condition.BAD) for index in ill.split(",") if index}
    found = [
        a_shared_gpu(gpu=a_gpu(index=n), health=healths.get(n, a_health()))
        for n in range(int(count))
    ]
    return an_inventory(gpus=found, generation=2)


SETTINGS = {"json": ReportSettings(), "colon": COLON}
HELD = {
    "asked": {HANDSHAKE: "Requesting_2026-09-01 12:00:00", "other": "kept"},
    "held": {REGISTER: encode_json(registered(an_inventory()))},
}
GIVEN = {"unscanned": Inventory(), "no-gpus": Inventory(generation=1)}
ERRORS = {
    "403": ApiForbidden("nodes is forbidden", status=403),
    "404": ApiNotFound("no such Node", status=404),
    "409": ApiConflict("conflict", status=409),
    "429": ApiThrottled("too many requests", status=429),
    "429/7": ApiThrottled("too many requests", status=429, retry_after=7),
    "429/20": ApiThrottled("too many requests", status=429, retry_after=20),
    "500": ApiError("internal error", status=500),
    "503/100": ApiError("not yet", status=503, retry_after=100),
    "none": ApiError("no answer in time"),
}


async def do(room: Reporting, word: str) -> None:
    """`settled`: until the server holds what the inventory says; `+5`: 5 s pass.

    `gpus=3:0`: the inventory from now on. `fail=409x20`: so do the next writes. `fight=6`: another
    writer comes back a second after each of our writes. `churn=60`: each second something is new.
    """
    verb, _, what = word.partition("=")
    if word.startswith("+"):
        await asyncio.sleep(float(word))
    elif verb == "settled":
        await room.settled()
        room.moments.append(f"{loop_time() - room.began:.1f}")
    elif verb == "gpus":
        room.inventory.set(of(what))
    elif verb == "churn":
        for second in range(int(what)):
            room.inventory.set(an_inventory(count=3, generation=2 + second))
            await asyncio.sleep(1)
    elif verb == "fight":
        form = THEIRS if room.settings.value != COLON else "GPU-theirs,{},1,1,T,0,true,0,:"
        for number in range(int(what)):
            room.api.edit_node({REGISTER: form.replace("{}", str(number))})
            await asyncio.sleep(1)
    elif verb == "fail":
        error, _, count = what.partition("x")
        room.api.fail(ERRORS[error], count=int(count), call="annotate_node")
    elif verb == "break-watch":
        room.api.fail(ApiError("connection refused"), call="watch_node")
        room.api.end_watches()
    elif verb in SETTINGS:
        room.settings.set(SETTINGS[verb])
    else:
        deeds: dict[str, Callable[[], object]] = {
            "down": room.api.begin_outage,
            "up": room.api.end_outage,
            "delete": room.api.delete_node,
            "create": room.api.create_node,
        }
        deeds[verb]()


def told(room: Reporting) -> str:
    """What was written, for which reasons, when it had settled, and what the Node says then."""
    counts = [f"{reason} {count}" for (reason,), count in room.reporter.writes.items()]
    parts = [f"{room.api.writes} writes: {', '.join(counts)}"]
    parts += [f"settled at {' '.join(room.moments)}"] * bool(room.moments)
    parts += [f"failed {key[0]} {count}" for key, count in room.reporter.failures.items()]
    text = room.says(REGISTER)
    gpus = [f"{gpu.index}{'' if gpu.healthy else '-'}" for gpu in read_register(text)]
    form = "nothing" if text is None else "json" if text.startswith("[") else "records"
    is_theirs = text is not None and "theirs" in text
    parts.append("theirs" if is_theirs else " ".join([form, *gpus]))
    others = set(room.api.node.annotations if room.api.node else ()) - {REGISTER}
    return " | ".join([*parts, *sorted(others), *(one.reason for one in room.events)]) + (
        f" | {room.unreported}" * bool(room.unreported)
    )


SCENARIOS = scenarios("report_scenarios.txt")


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_what_is_written_and_when_is_told(scenario):
    first, *words = scenario.split()
    chance = float(first.partition("=")[2] or 0) if first.startswith("chance") else 0.0
    given = GIVEN.get(first), SETTINGS.get(first)
    async with reporting(
        HELD.get(words[0] if first in GIVEN else first),
        inventory=given[0],
        settings=given[1],
        chance=chance,
    ) as room:
        for word in words if first in {*GIVEN, *SETTINGS, *HELD} or chance else [first, *words]:
            if word not in HELD:
                await do(room, word)
        assert SCENARIOS[scenario] == told(room)


def test_a_conflict_says_which_annotation_it_is_about_and_what_to_do():
    assert REGISTER in CONFLICT
    assert "stop the other device plugin" in CONFLICT


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


# Schedulers up to 2.7.1 read records, and a stamp each half a minute.


async def test_the_text_has_records_and_a_stamp_is_written_every_30_seconds_and_nothing_else():
    def stamped() -> tuple[str, dt.datetime | None]:
        return decode_handshake(room.says(HANDSHAKE) or "")

    async with reported(COLON) as room:
        text = room.says(REGISTER) or ""
        assert 2 == len(decode_register_colon(text))
        assert [9, 9, 1] == [len(record.split(",")) for record in text.split(":")]
        assert ("Reported", START) == stamped()
        await asyncio.sleep(3601)
        assert (120, 121) == (room.written("stamp"), room.api.writes)
        assert ("Reported", START + dt.timedelta(hours=1)) == stamped()
        assert not room.unreported

        # A request of the scheduler is answered with the next stamp.
        room.api.edit_node({HANDSHAKE: "Requesting_2026-08-21 07:20:41"})
        await asyncio.sleep(28)
        assert "Requesting" == stamped()[0]
        await asyncio.sleep(1 + TICK)
        assert ("Reported", START + dt.timedelta(seconds=3630)) == stamped()


async def test_the_score_is_beside_the_text_as_long_as_it_is_asked_for():
    linked = [
        a_shared_gpu(gpu=a_gpu(index=n, links=(Link(a_uuid(1 - n), PciPath.SAME_CPU, 2),)))
        for n in range(2)
    ]
    async with reporting(inventory=an_inventory(gpus=linked)) as room:
        await room.settled()
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


async def test_of_an_observer_every_change_is_told_and_none_written_whatever_others_write():
    with structlog.testing.capture_logs() as log:
        async with reporting(settings=SCORED, observes=True) as room:
            await asyncio.sleep(5)
            room.inventory.set(an_inventory(count=3, generation=2))
            await asyncio.sleep(5)
            assert {REGISTER, SCORE} == room.reporter.pending.keys()
            room.api.edit_node({key: room.reporter.pending[key] for key in (REGISTER, SCORE)})
            await asyncio.sleep(5)
            assert {} == room.reporter.pending
            for _ in range(100):
                room.api.edit_node({REGISTER: "[]", HANDSHAKE: "Requesting_2026-08-21 06:20:50"})
                await asyncio.sleep(1)
                room.api.edit_node({REGISTER: None})
                await asyncio.sleep(1)

            assert (0, ()) == (room.api.writes, room.reporter.writes.items())
            assert ([], "") == (room.events, room.unreported)
    told = [line["annotations"] for line in log if line["event"] == "observe.would_write"]
    assert 3 >= len(told)
    assert {REGISTER, SCORE} == set(told[1])


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


@contextlib.asynccontextmanager
async def scheduled(version: str) -> AsyncIterator[tuple[Reporting, Callable[[Inventory], bool]]]:
    """A node, and whether its scheduler's cache has an inventory; just after one of its looks."""
    registry = Registry() if version == "2.10" else OldRegistry(version)
    clock, allocatable = LoopClock(), Cell(0)

    async def count() -> None:
        async for inventory in room.inventory.follow():
            await asyncio.sleep(KUBELET)
            allocatable.set(sum(gpu.split_count for gpu in inventory.gpus if gpu.serving))

    async def look() -> NoReturn:
        while True:
            seen = {
                "metadata": {"name": NODE, "annotations": dict(room.api.node.annotations)},
                "status": {"allocatable": {COUNT: str(allocatable.value)}},
            }
            room.api.edit_node(registry.ingest(seen, clock.now()))
            await asyncio.sleep(INTERVAL)

    def knows(inventory: Inventory) -> bool:
        state, report = registry.state(NODE, {}), report_of(inventory, {}, room.settings.value)
        assert report is not None
        return state is not None and [*read_register(report.register)] == [
            gpu.capacity for gpu in state.gpus
        ]

    async with reported(ReportSettings(PROFILES[version])) as room, at_work(count, look):
        await asyncio.sleep(10 * INTERVAL + 0.01)
        assert knows(room.inventory.value)
        yield room, knows


def all_with(**changes: object) -> Inventory:
    """Two GPUs that are both changed so."""
    gpus = [msgspec.structs.replace(a_shared_gpu(gpu=a_gpu(index=n)), **changes) for n in range(2)]
    return an_inventory(gpus=gpus, generation=2)


DOUBLE = 2 * a_shared_gpu().registered_mib
COUNTED = {
    "ill": of("2:0"),
    "lost": an_inventory(
        gpus=[a_shared_gpu(present=False), a_shared_gpu(gpu=a_gpu(index=1))], generation=2
    ),
    "grown": of("3"),
    "split": all_with(split_count=4),
}
AS_MANY_SLICES = {
    "oversold": all_with(registered_mib=DOUBLE),
    "exchanged": an_inventory(gpus=[a_shared_gpu(gpu=a_gpu(index=n)) for n in (5, 6)]),
}


@pytest.mark.parametrize("offset", [0.1, 14.9])
@pytest.mark.parametrize("change", [*COUNTED, *AS_MANY_SLICES])
@pytest.mark.parametrize("version", PROFILES)
async def test_a_changed_inventory_is_in_the_cache_soon(version, change, offset):
    """Within 15 s; 2.8 reads it so long after the kubelet's new count, if that changes."""
    is_counting = version == "2.8"
    if is_counting and change in AS_MANY_SLICES:
        return
    async with scheduled(version) as (room, knows):
        await asyncio.sleep(offset)
        changed = (COUNTED | AS_MANY_SLICES)[change]
        room.inventory.set(changed)

        await asyncio.sleep(INTERVAL + KUBELET * is_counting)

        assert knows(changed)


async def test_an_old_scheduler_never_drops_a_node_whose_agent_lives():
    async with scheduled("2.7.1") as (room, knows):
        for _ in range(1200):
            assert knows(room.inventory.value)
            await asyncio.sleep(1)
