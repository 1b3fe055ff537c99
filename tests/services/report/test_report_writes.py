"""The register annotation is written when it must be, and only then."""

import asyncio

import msgspec
import pytest

from agent.cluster import HANDSHAKE, REGISTER
from agent.errors import ApiError, ApiThrottled
from agent.hami.register import decode_register, encode_register, registered
from agent.model import Condition, Inventory
from tests.builders import a_gpu, a_health, a_shared_gpu, an_inventory
from tests.fakes.apiserver import FakeApi
from tests.services.report.reporting import reported, reporting

OUTAGE = ApiError("connection refused")


def ill(inventory: Inventory, index: int = 0) -> Inventory:
    """The same, with one GPU bad."""
    gpus = list(inventory.gpus)
    gpus[index] = msgspec.structs.replace(gpus[index], health=a_health(condition=Condition.BAD))
    return msgspec.structs.replace(inventory, gpus=tuple(gpus), generation=inventory.generation + 1)


def text_of(inventory: Inventory) -> str:
    return encode_register(registered(inventory))


async def test_a_bare_node_gets_the_inventory_and_loses_the_handshake():
    api = FakeApi()
    api.create_node({HANDSHAKE: "Requesting_2026-09-01 12:00:00", "other": "kept"})

    async with reporting(api) as room:
        await room.settled()

    assert api.node is not None
    assert {REGISTER: text_of(an_inventory()), "other": "kept"} == api.node.annotations
    assert 1 == api.writes
    assert ((("missing",), 1),) == room.reporter.writes.items()


async def test_an_annotation_of_the_same_meaning_is_left_alone():
    turned = list(reversed(registered(an_inventory())))
    api = FakeApi()
    api.create_node({REGISTER: encode_register(turned).replace(",", ", ")})

    async with reporting(api) as room:
        await room.settled()

    assert 0 == api.writes


async def test_a_bad_gpu_is_told_without_delay():
    loop = asyncio.get_running_loop()

    async with reported() as room:
        began = loop.time()
        room.inventory.set(ill(an_inventory()))
        await room.settled()

    assert began == loop.time()
    assert (("health",), 1) in room.reporter.writes.items()


async def test_a_bad_gpu_does_not_wait_for_an_inventory_change_that_does():
    api = FakeApi()
    api.create_node()
    loop = asyncio.get_running_loop()
    grown = an_inventory(count=3, generation=2)

    async with reporting(api, chance=0.9) as room:
        await room.settled()
        began = loop.time()
        room.inventory.set(grown)
        await asyncio.sleep(0.5)
        assert 1 == api.writes
        room.inventory.set(ill(grown))
        await room.settled()

    assert pytest.approx(began + 0.5) == loop.time()
    assert 2 == api.writes


async def test_changes_within_the_jitter_become_one_write():
    api = FakeApi()
    api.create_node()

    async with reporting(api, chance=0.9) as room:
        await room.settled()
        for count in (3, 4, 5):
            room.inventory.set(an_inventory(count=count, generation=count))
            await asyncio.sleep(0.1)
        await room.settled()

    assert 2 == api.writes
    assert room.told(an_inventory(count=5))


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


async def test_a_new_difference_does_not_wait_for_the_retry_of_the_old_one():
    loop = asyncio.get_running_loop()

    async with reported() as room:
        api = room.api
        api.fail(OUTAGE, count=4, call="annotate_node")
        room.inventory.set(ill(an_inventory()))
        await asyncio.sleep(9)
        began = loop.time()
        room.inventory.set(ill(ill(an_inventory()), index=1))
        await room.settled()

    assert began == loop.time()


async def test_a_deleted_annotation_is_written_again():
    async with reported() as room:
        room.api.edit_node({REGISTER: None})
        await room.settled()

        assert room.told(an_inventory())
        assert (("foreign",), 1) in room.reporter.writes.items()


async def test_an_annotation_edited_by_hand_is_put_right():
    async with reported() as room:
        room.api.edit_node({REGISTER: "no JSON at all"})
        await room.settled()

        assert room.told(an_inventory())


async def test_a_node_that_was_created_again_is_reported_to():
    async with reported() as room:
        room.api.delete_node()
        await asyncio.sleep(60)
        assert not room.state.value.reported
        room.api.create_node()
        await room.settled()

        assert room.told(an_inventory())
        assert (("node-created",), 1) in room.reporter.writes.items()


async def test_before_the_first_scan_nothing_is_written():
    api = FakeApi()
    api.create_node({REGISTER: text_of(an_inventory())})

    async with reporting(api, inventory=Inventory()) as room:
        await asyncio.sleep(3600)
        assert "no GPU has been found yet" == room.state.value.reason

    assert 0 == api.writes


async def test_without_any_gpu_left_the_known_ones_are_told_unhealthy_and_never_an_empty_list():
    async with reported() as room:
        api = room.api
        room.inventory.set(Inventory(generation=2))
        await room.settled()

    assert api.node is not None
    left = decode_register(api.node.annotations[REGISTER])
    assert [False, False] == [gpu.healthy for gpu in left]


async def test_a_node_that_never_had_gpus_gets_no_annotation():
    api = FakeApi()
    api.create_node()

    async with reporting(api, inventory=Inventory(generation=1)):
        await asyncio.sleep(3600)

    assert 0 == api.writes


@pytest.mark.timeout(60)
async def test_after_a_day_without_an_api_server_the_newest_inventory_arrives():
    newest = an_inventory(gpus=[a_shared_gpu(gpu=a_gpu(index=7))], generation=9)

    async with reported() as room:
        api = room.api
        api.begin_outage()
        room.inventory.set(an_inventory(count=1, generation=2))
        await asyncio.sleep(86_400)
        room.inventory.set(newest)
        api.end_outage()
        await room.settled()

    assert room.told(newest)
    assert 2 == sum(count for _, count in room.reporter.writes.items())
    assert api.calls["annotate_node"] < 86_400 / 20
