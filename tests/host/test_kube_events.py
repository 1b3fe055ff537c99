"""Events at the API server: one object for a series, for the Node and for pods."""

from pathlib import Path

import pytest

from agent.cluster import NodeEvent, PodUid
from agent.errors import ApiError
from agent.kube import events as series
from agent.kube.events import EventPoster
from tests.builders import NODE
from tests.fakes.clock import START, ManualClock
from tests.fakes.kubeworld import NAMESPACE, ModelWorld, model_world

pytestmark = pytest.mark.looptime(False)

ILL = NodeEvent("GpuUnhealthy", "XID 79\non GPU 1 " + "x" * 2000, warning=True)
REFUSED = NodeEvent("AllocationRefused", "why", True, NAMESPACE, "one", PodUid("u-1"))
SERVED = NodeEvent("Served", "how", False, NAMESPACE, "one", PodUid("u-1"))


def a_poster(world: ModelWorld) -> EventPoster:
    return EventPoster(world.session, NODE, ManualClock())


async def test_an_event_of_the_node_is_found_by_describe_node(tmp_path: Path):
    async with model_world(tmp_path) as world:
        await a_poster(world).post(ILL)
        (event,) = world.store.select("events")

    assert {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": NODE} == event[
        "involvedObject"
    ]
    assert "default" == event["metadata"]["namespace"]
    assert event["message"].startswith("XID 79 on GPU 1 x")
    assert 1024 == len(event["message"])
    assert ("Warning", 1) == (event["type"], event["count"])
    assert START.strftime("%Y-%m-%dT%H:%M:%SZ") == event["firstTimestamp"]


async def test_an_event_of_a_pod_lies_in_its_namespace(tmp_path: Path):
    async with model_world(tmp_path) as world:
        await a_poster(world).post(SERVED)
        (event,) = world.store.select("events")

    assert {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": NAMESPACE,
        "name": "one",
        "uid": "u-1",
    } == event["involvedObject"]
    assert NAMESPACE == event["metadata"]["namespace"]
    assert "Normal" == event["type"]


async def test_a_repeated_event_is_counted_and_the_series_updated_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with model_world(tmp_path) as world:
        poster = a_poster(world)
        for _ in range(3):
            await poster.post(REFUSED)
        monkeypatch.setattr(series, "UPDATE_GAP", 0.0)
        await poster.post(REFUSED)
        (event,) = world.store.select("events")

        assert 4 == event["count"]
        assert (
            (("AllocationRefused", "count"), 2),
            (("AllocationRefused", "create"), 1),
            (("AllocationRefused", "update"), 1),
        ) == poster.posted.items()


async def test_after_a_restart_the_same_event_goes_on(tmp_path: Path):
    async with model_world(tmp_path) as world:
        await a_poster(world).post(REFUSED)
        await a_poster(world).post(REFUSED)
        (event,) = world.store.select("events")

    assert 2 == event["count"]


async def test_an_event_that_the_server_forgot_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(series, "UPDATE_GAP", 0.0)
    async with model_world(tmp_path) as world:
        poster = a_poster(world)
        await poster.post(REFUSED)
        (event,) = world.store.select("events")
        world.store.delete("events", NAMESPACE, event["metadata"]["name"])
        await poster.post(REFUSED)
        (again,) = world.store.select("events")

    assert 2 == again["count"]


async def test_an_event_that_could_not_be_written_is_written_by_the_next_try(tmp_path: Path):
    async with model_world(tmp_path) as world:
        poster = a_poster(world)
        world.throttle(1, retry_after=1)
        with pytest.raises(ApiError):
            await poster.post(REFUSED)
        await poster.post(REFUSED)
        (event,) = world.store.select("events")

    assert 1 == event["count"]
