"""Events at the API server: one object for a series, few of them, for the Node and for pods."""

from pathlib import Path

import pytest

from agent.cluster import NodeEvent, PodUid
from agent.errors import ApiError
from agent.kube import events as series
from agent.kube.events import (
    BURST,
    PODS_BURST,
    PODS_REFILL,
    REMEMBERED,
    EventBook,
    EventPoster,
    SeriesStep,
    event_name,
)
from tests.builders import NODE
from tests.fakes.clock import START, ManualClock
from tests.fakes.kubeworld import NAMESPACE, ModelWorld, model_world

pytestmark = pytest.mark.looptime(False)

ILL = NodeEvent("GpuUnhealthy", "XID 79\non GPU 1 " + "x" * 2000, warning=True)
FALLEN = NodeEvent("GpuUnhealthy", "XID 79 on GPU 1", warning=True)
REFUSED = NodeEvent("AllocationRefused", "why", True, NAMESPACE, "one", PodUid("u-1"))
SERVED = NodeEvent("Served", "how", False, NAMESPACE, "one", PodUid("u-1"))


def a_poster(world: ModelWorld) -> EventPoster:
    return EventPoster(world.session, NODE, ManualClock())


async def test_an_event_of_the_node_is_found_by_describe_node_and_a_pods_in_its_namespace(
    tmp_path: Path,
):
    async with model_world(tmp_path) as world:
        for event in (ILL, SERVED):
            await a_poster(world).post(event)
        found = {event["reason"]: event for event in world.store.select("events")}

    ill, served = found["GpuUnhealthy"], found["Served"]
    node = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": NODE}
    pod = {"apiVersion": "v1", "kind": "Pod", "namespace": NAMESPACE, "name": "one", "uid": "u-1"}
    assert [node, pod] == [event["involvedObject"] for event in (ill, served)]
    assert ("default", NAMESPACE) == (ill["metadata"]["namespace"], served["metadata"]["namespace"])
    assert ill["message"].startswith("XID 79 on GPU 1 x")
    assert 1024 == len(ill["message"])
    assert ("Warning", 1, "Normal") == (ill["type"], ill["count"], served["type"])
    assert START.strftime("%Y-%m-%dT%H:%M:%SZ") == ill["firstTimestamp"]


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


def about(number: int, pod: str = "one") -> NodeEvent:
    return NodeEvent("AllocationRefused", f"why {number}", True, "team-a", pod, PodUid("u"))


def send(book: EventBook, event: NodeEvent, now: float) -> SeriesStep:
    """Plan, and write where the plan says so."""
    step, series = book.plan(event, event.pod or "node-1", now)
    if step in {SeriesStep.CREATE, SeriesStep.UPDATE}:
        book.sent(event, series, now)
    return step


def test_a_series_is_created_then_counted_then_updated_once_a_minute():
    book = EventBook()

    steps = [send(book, FALLEN, now) for now in (0, 1, 59, 60, 61, 121)]

    assert ["create", "count", "count", "update", "count", "update"] == steps
    assert 7 == book.plan(FALLEN, "node-1", 122)[1].count


def test_an_object_has_a_burst_and_then_one_every_five_minutes():
    book = EventBook()
    burst = [send(book, about(n), 0) for n in range(BURST + 10)]
    later = [send(book, about(100 + n), 300 + n) for n in range(10)]

    assert [SeriesStep.CREATE] * BURST + [SeriesStep.DROP] * 10 == burst
    assert [SeriesStep.CREATE] + [SeriesStep.DROP] * 9 == later


def test_one_object_does_not_use_up_the_allowance_of_another():
    book = EventBook()
    for n in range(BURST + 1):
        send(book, about(n), 0)

    assert SeriesStep.CREATE == send(book, about(1, pod="two"), 0)
    assert SeriesStep.CREATE == send(book, FALLEN, 0)


def test_pods_under_ever_new_names_share_an_allowance_and_take_nothing_of_the_nodes():
    book = EventBook()
    storm = [send(book, about(1, pod=f"pod-{n}"), 0) for n in range(PODS_BURST + 50)]
    later = [send(book, about(1, pod=f"late-{n}"), 2 * PODS_REFILL) for n in range(10)]

    assert [SeriesStep.CREATE] * PODS_BURST + [SeriesStep.DROP] * 50 == storm
    assert [SeriesStep.CREATE] * 2 + [SeriesStep.DROP] * 8 == later
    assert SeriesStep.CREATE == send(book, FALLEN, 0)


def test_what_pods_make_us_say_of_the_node_hides_none_of_its_other_events():
    book = EventBook()
    refused = [NodeEvent("AllocationRefused", f"asks for {n} slice(s)", True) for n in range(99)]

    steps = [send(book, event, 0) for event in refused]

    assert [SeriesStep.CREATE] * BURST + [SeriesStep.DROP] * (99 - BURST) == steps
    assert SeriesStep.CREATE == send(book, FALLEN, 0)


def test_a_failed_write_costs_nothing_and_is_no_occurrence():
    book = EventBook()
    for _ in range(BURST + 5):
        step, series = book.plan(FALLEN, "node-1", 0)
        book.failed(series)
    step, series = book.plan(FALLEN, "node-1", 0)

    assert (SeriesStep.CREATE, 1) == (step, series.count)


def test_memory_is_bounded():
    book = EventBook()
    for n in range(REMEMBERED + 10):
        send(book, about(n, pod=f"pod-{n}"), n * PODS_REFILL)
    now = REMEMBERED * PODS_REFILL + 20

    assert SeriesStep.CREATE == send(book, about(0, pod="pod-0"), now)
    assert SeriesStep.COUNT == send(book, about(REMEMBERED + 9, pod=f"pod-{REMEMBERED + 9}"), now)


def test_a_name_is_the_object_and_a_hash_and_the_same_after_a_restart():
    name = event_name(FALLEN, "node-1")

    assert name == event_name(NodeEvent("GpuUnhealthy", "XID 79 on GPU 1", warning=True), "node-1")
    assert name.startswith("node-1.")
    assert 16 == len(name.rpartition(".")[2])


def test_a_long_name_stays_a_name():
    assert 253 > len(event_name(FALLEN, "a" * 253))
    assert ".-" not in event_name(FALLEN, "a" * 199 + ".-" + "b" * 50)
