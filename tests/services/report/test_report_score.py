"""The score annotation: beside the register annotation, and only where it is asked for."""

import asyncio
import json

import msgspec

from agent.cluster import CORDON, HANDSHAKE, REGISTER, SCORE
from agent.hami.register import ReportProfile, ReportSettings, encode_register, registered
from agent.model import Link, PciPath
from tests.builders import a_gpu, a_shared_gpu, a_uuid, an_inventory
from tests.fakes.apiserver import FakeApi
from tests.services.report.reporting import SCORED, reported, reporting


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


async def test_without_the_setting_nothing_is_written_there():
    async with reported(inventory=linked(2, 2)) as room:
        assert room.says(SCORE) is None


async def test_with_the_setting_one_write_says_both():
    async with reported(inventory=linked(2, 2), settings=SCORED) as room:
        first, second = json.loads(room.says(SCORE) or "")

        assert {"uuid": a_uuid(0), "score": {a_uuid(1): 220}} == first
        assert {"uuid": a_uuid(1), "score": {a_uuid(0): 220}} == second
        assert 1 == room.api.writes


async def test_older_schedulers_get_the_same_score():
    settings = ReportSettings(ReportProfile.COLON, topology_score=True)
    async with reported(inventory=linked(2, 2), settings=settings) as room:
        assert 2 == len(json.loads(room.says(SCORE) or ""))


async def test_changed_links_alone_are_told_and_the_scheduler_made_to_read_them():
    async with reported(inventory=linked(2, 2), settings=SCORED) as room:
        room.api.edit_node({HANDSHAKE: "Requesting_2026-08-21 06:20:50"})
        before = room.says(REGISTER)
        room.inventory.set(linked(4, 4, generation=2))
        await room.settled()

        assert '"score":{"' in (room.says(SCORE) or "")
        assert "420" in (room.says(SCORE) or "")
        assert (before, None) == (room.says(REGISTER), room.says(HANDSHAKE))
        assert 1 == room.written("score")


async def test_the_setting_is_taken_over_in_both_directions():
    async with reported(inventory=linked(2, 2)) as room:
        room.settings.set(SCORED)
        await room.settled()
        assert room.says(SCORE) is not None
        room.settings.set(ReportSettings())
        await room.settled()

        assert room.says(SCORE) is None
        assert 2 == room.written("score")


async def test_a_score_of_the_same_meaning_is_left_alone():
    inventory = linked(2, 2)
    async with reported(inventory=inventory, settings=SCORED) as room:
        score = json.dumps(list(reversed(json.loads(room.says(SCORE) or ""))))
    api = FakeApi()
    api.create_node({REGISTER: encode_register(registered(inventory)), SCORE: score})

    async with reporting(api, inventory=inventory, settings=SCORED) as room:
        await room.settled()
        await asyncio.sleep(3600)

    assert 0 == api.writes


async def test_a_score_edited_by_hand_is_put_right():
    async with reported(inventory=linked(2, 2), settings=SCORED) as room:
        before = room.says(SCORE)
        room.api.edit_node({SCORE: "{}"})
        await room.settled()

        assert before == room.says(SCORE)
        assert 1 == room.written("foreign")


async def test_a_pair_with_different_sides_scores_nothing_and_is_told_once():
    async with reported(inventory=linked(2, 0), settings=SCORED) as room:
        await asyncio.sleep(3600)

        (event,) = room.events
        assert ("AsymmetricGPUP2PLink", True) == (event.reason, event.warning)
        assert a_uuid(0) in event.text
        assert [0, 0] == [
            points for one in json.loads(room.says(SCORE) or "") for points in one["score"].values()
        ]


async def test_without_any_gpu_left_the_scores_stay_as_the_gpus_do():
    async with reported(inventory=linked(2, 2), settings=SCORED) as room:
        before = room.says(SCORE)
        room.inventory.set(msgspec.structs.replace(linked(2, 2, generation=2), gpus=()))
        await room.settled()

        assert before == room.says(SCORE)


async def test_cordoned_gpus_are_the_operators_and_never_touched():
    cordoned = f" {a_uuid(0)} ,,GPU-of-another-node"
    async with reported(inventory=linked(2, 2), settings=SCORED) as room:
        room.api.edit_node({CORDON: cordoned})
        await asyncio.sleep(60)
        assert 1 == room.api.writes
        room.inventory.set(linked(4, 4, 4, generation=2))
        await room.settled()

        assert cordoned == room.says(CORDON)
