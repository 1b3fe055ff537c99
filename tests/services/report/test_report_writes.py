"""The register annotation is written when it must be, and only then, whatever the server answers.

Another writer of it is put right a few times, then left and told.
"""

import asyncio
import datetime as dt
import json

import msgspec
import pytest

from agent.cluster import HANDSHAKE, REGISTER, SCORE
from agent.errors import ApiConflict, ApiError, ApiForbidden, ApiNotFound, ApiThrottled
from agent.hami.annotations import (
    ReportSettings,
    decode_register,
    decode_register_colon,
    encode_json,
    registered,
)
from agent.model import Condition, Inventory, Link, PciPath
from agent.report import CONFLICT, SPREAD, TICK
from agent.sandbox.scheduler.registry import decode_handshake
from tests.builders import a_gpu, a_health, a_shared_gpu, a_uuid, an_inventory
from tests.fakes.apiserver import FakeApi
from tests.fakes.clock import START
from tests.services.report.reporting import COLON, SCORED, Reporting, reported, reporting

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
