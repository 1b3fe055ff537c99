"""An agent that observes: its reporter finds its writes done, and the API server sees none."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from agent.cluster import HANDSHAKE, MUTEX_LOCK, REGISTER, SCORE, NodeEvent, PodUid
from agent.errors import ApiNotFound
from agent.hami.register import ReportProfile, ReportSettings
from agent.kube.api import KubePods, ObservedNode
from tests.builders import NODE, RESOURCE, an_inventory
from tests.fakes.apiserver import FakeApi
from tests.fakes.kubeworld import NAMESPACE, model_world
from tests.services.report.reporting import SCORED, Reporting, reporting, text_in

THEIRS = '[{"id":"GPU-theirs","count":1}]'


@dataclasses.dataclass
class ObservedRoom:
    """A reporter behind an observed Node."""

    report: Reporting
    node: ObservedNode
    log: list

    def told(self) -> list[dict]:
        """What the log says would be written."""
        return [line["annotations"] for line in self.log if line["event"] == "observe.would_write"]


@contextlib.asynccontextmanager
async def observing(
    annotations: dict[str, str] | None = None, settings: ReportSettings | None = None
) -> AsyncIterator[ObservedRoom]:
    api = FakeApi()
    api.create_node(annotations)
    node = ObservedNode(api)
    with structlog.testing.capture_logs() as log:
        async with reporting(api, settings=settings, through=node) as report:
            await asyncio.sleep(5)
            yield ObservedRoom(report, node, log)
    assert 0 == api.writes


async def test_what_would_be_written_is_told_once():
    async with observing({"other": "kept"}) as room:
        text = text_in(an_inventory())
        await asyncio.sleep(3600)

        assert [{REGISTER: text}] == room.told()
        assert {REGISTER: text} == room.node.pending
        assert room.report.state.value.reported


async def test_every_change_is_told_and_what_is_right_again_is_pending_no_more():
    async with observing(settings=SCORED) as room:
        room.report.inventory.set(an_inventory(count=3, generation=2))
        await asyncio.sleep(5)

        assert 2 == len(room.told())
        assert {REGISTER, SCORE} == set(room.told()[1])
        assert [] == [line for line in room.log if line["event"] == "report.written"]
        room.report.api.edit_node({key: room.node.pending[key] for key in (REGISTER, SCORE)})
        await asyncio.sleep(5)
        assert {} == room.node.pending


async def test_the_plugin_beside_us_may_write_as_it_likes_and_is_no_adversary():
    async with observing() as room:
        for _ in range(100):
            room.report.api.edit_node(
                {REGISTER: THEIRS, HANDSHAKE: "Requesting_2026-08-21 06:20:50"}
            )
            await asyncio.sleep(1)
            room.report.api.edit_node({REGISTER: None})
            await asyncio.sleep(1)

        assert 1 == len(room.told())
        assert [] == room.report.events
        assert room.report.state.value.reported


async def test_an_inventory_that_is_again_what_the_node_says_is_nothing_to_write():
    async with observing({REGISTER: text_in(an_inventory())}) as room:
        room.report.inventory.set(an_inventory(count=3, generation=2))
        await asyncio.sleep(5)
        room.report.inventory.set(an_inventory(generation=3))
        await asyncio.sleep(5)
        assert {} == room.node.pending
        assert [{REGISTER: text_in(an_inventory(count=3))}] == room.told()
        room.report.inventory.set(an_inventory(count=3, generation=4))
        await asyncio.sleep(5)

        assert 2 == len(room.told())


async def test_a_node_that_is_created_again_is_told_anew():
    async with observing() as room:
        room.report.api.delete_node()
        await asyncio.sleep(5)
        assert {} == room.node.pending
        room.report.api.create_node()
        await asyncio.sleep(5)

        assert 2 == len(room.told())


async def test_stamps_for_old_schedulers_are_no_news():
    async with observing(settings=ReportSettings(ReportProfile.COLON)) as room:
        await asyncio.sleep(3600)

        assert 1 == len(room.told())
        assert [REGISTER] == list(room.told()[0])


async def test_watches_that_end_outages_and_a_node_that_goes_unseen_change_nothing():
    async with observing() as room:
        room.report.api.end_watches()
        room.report.api.begin_outage()
        await asyncio.sleep(300)
        assert 1 == len(room.told())
        room.report.api.delete_node()
        room.report.api.end_outage()
        await asyncio.sleep(300)

        assert 1 == len(room.told())
        assert room.report.node.value is None


async def test_nothing_is_written_to_a_node_that_was_not_seen():
    with pytest.raises(ApiNotFound):
        await ObservedNode(FakeApi()).annotate_node({REGISTER: THEIRS})


@pytest.mark.looptime(False)
async def test_locks_pods_and_events_are_told_and_left_alone(tmp_path: Path):
    api = FakeApi()
    api.create_node({MUTEX_LOCK: "held"})
    async with model_world(tmp_path) as world:
        uid = world.create_pod("one")
        pods = KubePods(world.session, NODE, RESOURCE, world.poster, observes=True)
        with structlog.testing.capture_logs() as log:
            await ObservedNode(api).release_lock(MUTEX_LOCK, "held")
            await pods.annotate_pod(NAMESPACE, "one", PodUid(uid), {"b": "2", "a": None})
            await pods.post_event(NodeEvent("ReportConflict", "a text", warning=True))

        assert [] == world.events()
        assert {} == world.pod_annotations("one")

    told = [line for line in log if line["event"].startswith("observe.")]
    assert ["would_release", "would_annotate", "would_post"] == [
        line["event"].partition(".")[2] for line in told
    ]
    assert ["a", "b"] == told[1]["keys"]
    assert 0 == api.writes


async def test_a_look_at_the_node_shows_what_would_have_been_written_until_it_is_made_anew():
    async with observing({"other": "kept"}) as room:
        text = text_in(an_inventory())
        room.report.api.edit_node({"other": "changed"})
        seen = await room.node.get_node()
        assert seen is not None
        assert {REGISTER: text, "other": "changed"} == seen.annotations

        room.report.api.delete_node()
        room.report.api.create_node({"other": "new"})

        assert room.report.api.node == await room.node.get_node()
