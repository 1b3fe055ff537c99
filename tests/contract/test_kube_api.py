"""One body for the fake API server and for the real adapter over HTTP: both keep the same word."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.cluster import NodeView, PodChange, PodUid
from agent.errors import ApiError, ApiGone, ApiInvalid, ApiNotFound, ApiThrottled
from tests.builders import NODE
from tests.fakes.kubeworld import NAMESPACE, KubeWorld, a_world

pytestmark = pytest.mark.looptime(False)

LOCK = "hami.io/mutex.lock"
HELD = "2026-09-01T12:00:00Z,team-a,one"
MARKS = {"hami.io/bind-phase": "success"}
THE_NODE = f"system:node:{NODE}"
THE_ACCOUNT = "system:serviceaccount:hami:hami-agent"


@pytest.fixture(params=["fake", "model"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which of the two."""
    return str(request.param)


@contextlib.asynccontextmanager
async def cluster(kind: str, folder: Path, identity: str = THE_NODE) -> AsyncIterator[KubeWorld]:
    """A cluster with this Node; nothing in it may take long."""
    async with asyncio.timeout(30), a_world(kind, folder, identity) as world:
        world.create_node({LOCK: HELD, "plain": "kept"})
        yield world


async def test_annotations_of_the_node_are_patched_and_our_lock_is_released_and_no_other(
    kind, tmp_path
):
    async with cluster(kind, tmp_path) as world:
        for now in ("2026-09-01T12:00:09Z,team-b,two", None):
            world.edit_node({LOCK: now})
            with pytest.raises(ApiInvalid):
                await world.node_api.release_lock(LOCK, HELD)
            assert now == world.node_annotations().get(LOCK)
        world.edit_node({LOCK: HELD})
        await world.node_api.release_lock(LOCK, HELD)
        assert {"plain": "kept"} == world.node_annotations()

        world.edit_node({LOCK: HELD})
        node = await world.node_api.annotate_node({"hami.io/x": "1", LOCK: None, "absent": None})
        assert (NODE, {"hami.io/x": "1", "plain": "kept"}) == (node.name, node.annotations)
        assert node.annotations == world.node_annotations()


async def test_the_node_watch_begins_with_the_node_and_follows_it(kind, tmp_path):
    async with cluster(kind, tmp_path) as world:
        watch = world.node_api.watch_node()
        seen = [await anext(watch)]
        for change in (
            lambda: world.edit_node({"plain": "changed"}),
            world.delete_node,
            lambda: world.create_node({"plain": "new"}),
        ):
            change()
            seen.append(await anext(watch))

        assert ["kept", "changed", None, "new"] == [
            node and node.annotations["plain"] for node in seen
        ]
        assert seen[0].uid != seen[3].uid


@pytest.mark.parametrize("is_created", [False, True])
async def test_the_watch_of_an_absent_node_shows_its_creation_or_at_its_end_that_there_is_none(
    kind, tmp_path, *, is_created
):
    async def first() -> NodeView | None:
        return await anext(world.node_api.watch_node())

    async with cluster(kind, tmp_path) as world, asyncio.TaskGroup() as group:
        world.delete_node()
        assert await world.node_api.get_node() is None  # the session is open
        showing = group.create_task(first())
        await asyncio.sleep(0.3)
        assert not showing.done()
        if is_created:
            world.create_node({"plain": "new"})
        else:
            world.end_watches()

        assert is_created is (await showing is not None)


@pytest.mark.parametrize("identity", [THE_NODE, THE_ACCOUNT])
async def test_a_get_shows_the_node_as_the_watch_does(kind, tmp_path, identity):
    async with cluster(kind, tmp_path, identity) as world:
        watch = world.node_api.watch_node()
        begun = await anext(watch)
        first = await world.node_api.get_node()
        world.edit_node({LOCK: None})
        second = await world.node_api.get_node()
        changed = await anext(watch)

        assert [begun, changed] == [first, second]
        assert second is not None
        assert {"plain": "kept"} == second.annotations


async def test_what_is_missing_is_found_by_no_get_and_takes_no_patch(kind, tmp_path):
    async with cluster(kind, tmp_path, THE_ACCOUNT) as world:
        first = world.create_pod("one")
        world.delete_pod("one")
        world.delete_node()

        assert await world.node_api.get_node() is None
        assert await world.pod_api.get_pod(NAMESPACE, "one") is None
        assert await world.pod_api.get_pod("elsewhere", "one") is None
        with pytest.raises(ApiNotFound) as raised:
            await world.node_api.annotate_node({"a": "b"})
        assert 404 == raised.value.status
        with pytest.raises(ApiNotFound):
            await world.pod_api.annotate_pod(NAMESPACE, "one", PodUid(first), {"hami.io/a": "1"})
        second = world.create_pod("one")
        got = await world.pod_api.get_pod(NAMESPACE, "one")
        assert got is not None
        assert first != second == got.uid


@pytest.mark.parametrize("node", ["another", ""])
async def test_a_get_finds_no_pod_that_is_not_on_this_node(kind, tmp_path, node):
    async with cluster(kind, tmp_path, THE_ACCOUNT) as world:
        world.create_pod("one", node)
        assert await world.pod_api.get_pod(NAMESPACE, "one") is None


async def test_pods_are_listed_and_watched_from_there_until_they_are_deleted(kind, tmp_path):
    async with cluster(kind, tmp_path) as world:
        uid = world.create_pod("one")
        world.edit_pod("one", MARKS)
        found = await world.pod_api.list_pods()
        assert [(uid, "one", NODE, 1)] == [
            (pod.uid, pod.name, pod.node, pod.containers[0].count) for pod in found.pods
        ]
        world.create_pod("two")
        watch = world.pod_api.watch_pods(found.resource_version)
        opened, added = await anext(watch), await anext(watch)
        assert PodChange(found.resource_version) == opened
        assert ("two", added.resource_version) == (added.pod.name, added.pod.resource_version)
        assert int(found.resource_version) < int(added.resource_version)

        world.delete_pod("one")
        change = await anext(watch)
        while not change.deleted:  # told before as one that is being deleted
            change = await anext(watch)
        assert (uid, MARKS) == (change.pod.uid, change.pod.annotations)

        # A watch that ends in time says how far it came, and a forgotten position is gone.
        world.end_watches()
        rest = [change async for change in watch]
        assert [None] == [change.pod for change in rest]
        assert int(change.resource_version) <= int(rest[-1].resource_version)
        world.forget_history()
        with pytest.raises(ApiGone):
            async for _ in world.pod_api.watch_pods(found.resource_version):
                pass


async def test_annotations_of_a_pod_are_patched_and_never_of_a_new_one_of_its_name(kind, tmp_path):
    async with cluster(kind, tmp_path) as world:
        uid = PodUid(world.create_pod("one"))
        world.edit_pod("one", {"hami.io/a": "1", "hami.io/b": "2"})
        await world.pod_api.annotate_pod(NAMESPACE, "one", uid, {"hami.io/a": None, **MARKS})
        assert {"hami.io/b": "2", **MARKS} == world.pod_annotations("one")

        world.delete_pod("one")
        world.create_pod("one")
        with pytest.raises(ApiInvalid) as raised:
            await world.pod_api.annotate_pod(NAMESPACE, "one", uid, MARKS)
        assert (422, {}) == (raised.value.status, world.pod_annotations("one"))


async def test_a_throttled_request_says_when_to_come_back(kind, tmp_path):
    async with cluster(kind, tmp_path) as world:
        world.create_pod("one")
        world.throttle(4, retry_after=7)
        for ask in (
            world.node_api.annotate_node({"a": "b"}),
            world.node_api.get_node(),
            world.pod_api.get_pod(NAMESPACE, "one"),
            anext(world.pod_api.watch_pods("1")),
        ):
            with pytest.raises(ApiThrottled) as raised:
                await ask
            assert (429, 7.0) == (raised.value.status, raised.value.retry_after)
        await world.node_api.annotate_node({"a": "b"})


async def test_an_outage_breaks_watches_and_ends(kind, tmp_path):
    async with cluster(kind, tmp_path) as world:
        found = await world.pod_api.list_pods()
        watch = world.pod_api.watch_pods(found.resource_version)
        await anext(watch)
        await world.begin_outage()
        with pytest.raises(ApiError) as broken:
            await anext(watch)
        with pytest.raises(ApiError) as refused:
            await world.node_api.annotate_node({"a": "b"})
        for ask in (world.pod_api.get_pod(NAMESPACE, "one"), world.node_api.get_node()):
            with pytest.raises(ApiError):
                await ask
        world.create_pod("one")
        await world.end_outage()
        await world.node_api.annotate_node({"a": "b"})
        again = world.pod_api.watch_pods(found.resource_version)
        await anext(again)
        change = await anext(again)

        assert [0, 0] == [broken.value.status, refused.value.status]
        assert change.pod is not None
        assert "one" == change.pod.name
