"""Events at the API server: one object for a series, few of them, for the Node and for pods."""

import asyncio

import pytest

from agent.cluster import NodeEvent, PodUid
from agent.errors import ApiConflict, ApiError
from agent.kube import objects as series
from agent.kube.objects import BURST, PODS_BURST, PODS_REFILL, EventPoster
from tests.builders import NODE
from tests.fakes.clock import START, ManualClock
from tests.fakes.kubeworld import NAMESPACE, ModelWorld

ILL = NodeEvent("GpuUnhealthy", "XID 79\non GPU 1 " + "x" * 2000, warning=True)
FALLEN = NodeEvent("GpuUnhealthy", "XID 79 on GPU 1", warning=True)
REFUSED = NodeEvent("AllocationRefused", "why", True, NAMESPACE, "one", PodUid("u-1"))
SERVED = NodeEvent("Served", "how", False, NAMESPACE, "one", PodUid("u-1"))


def a_poster(world: ModelWorld) -> EventPoster:
    return EventPoster(world.session, NODE, ManualClock())


@pytest.mark.looptime(False)
async def test_an_event_of_the_node_is_found_by_describe_node_and_a_pods_in_its_namespace(world):
    for event in (ILL, SERVED):
        await a_poster(world).post(event)

    found = {event["reason"]: event for event in world.store.select("events")}
    ill, served = found["GpuUnhealthy"], found["Served"]
    node = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": NODE}
    pod = {"apiVersion": "v1", "kind": "Pod", "namespace": NAMESPACE, "name": "one", "uid": "u-1"}
    assert [node, pod] == [event["involvedObject"] for event in (ill, served)]
    assert ("default", NAMESPACE) == (ill["metadata"]["namespace"], served["metadata"]["namespace"])
    assert ("XID 79 on GPU 1 x", 1024) == (ill["message"][:17], len(ill["message"]))
    assert ("Warning", 1, "Normal") == (ill["type"], ill["count"], served["type"])
    assert START.strftime("%Y-%m-%dT%H:%M:%SZ") == ill["firstTimestamp"]


@pytest.mark.looptime(False)
@pytest.mark.parametrize("happens", ["a restart", "the server forgets it"])
async def test_an_event_goes_on_after_a_restart_and_where_the_server_forgot_it(
    world, monkeypatch, happens
):
    monkeypatch.setattr(series, "UPDATE_GAP", 0.0)
    poster = a_poster(world)
    await poster.post(REFUSED)
    if happens == "a restart":
        poster = a_poster(world)
    else:
        (event,) = world.store.select("events")
        world.store.delete("events", NAMESPACE, event["metadata"]["name"])
    await poster.post(REFUSED)

    assert [2] == [event["count"] for event in world.store.select("events")]


def about(number: int, pod: str = "one") -> NodeEvent:
    return NodeEvent("AllocationRefused", f"why {number}", True, "team-a", pod, PodUid("u"))


class EventsApi:
    """Takes the requests of a poster. `is_lost`: no answer comes."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.is_lost = False
        self.names = set[str]()

    async def call(self, request) -> None:
        name = request.body["metadata"]["name"] if request.verb == "create" else ""
        if name in self.names:
            raise ApiConflict("exists")
        self.counts.append(request.body["count"])
        if self.is_lost:
            raise ApiError("no answer")
        self.names |= {name} - {""}


class Posting:
    """A poster whose outcomes are looked at one by one, on virtual time."""

    def __init__(self) -> None:
        self.api = EventsApi()
        self.poster = EventPoster(self.api, "node-1", ManualClock())  # type: ignore[arg-type]

    async def outcomes(self, *events: NodeEvent) -> list[str]:
        found = []
        for event in events:
            before = set(self.poster.posted.items())
            await self.poster.post(event)
            (((_, outcome), _),) = set(self.poster.posted.items()) - before
            found.append(outcome)
        return found


async def test_a_series_is_created_then_counted_then_updated_once_a_minute():
    posting, steps = Posting(), []
    for seconds in (0, 1, 58, 1, 1, 60):
        await asyncio.sleep(seconds)
        steps += await posting.outcomes(FALLEN)

    assert ["create", "count", "count", "update", "count", "update"] == steps
    assert [1, 4, 6] == posting.api.counts


async def test_an_object_has_a_burst_and_then_one_every_five_minutes():
    posting = Posting()
    burst = await posting.outcomes(*(about(n) for n in range(BURST + 10)))
    await asyncio.sleep(300)
    later = await posting.outcomes(*(about(100 + n) for n in range(10)))

    assert ["create"] * BURST + ["drop"] * 10 == burst
    assert ["create"] == await posting.outcomes(about(1, pod="two"))  # another has its own
    assert ["create"] + ["drop"] * 9 == later


async def test_pods_under_ever_new_names_share_an_allowance_and_take_nothing_of_the_nodes():
    posting = Posting()
    storm = await posting.outcomes(*(about(1, pod=f"pod-{n}") for n in range(PODS_BURST + 50)))
    await asyncio.sleep(2 * PODS_REFILL)
    later = await posting.outcomes(*(about(1, pod=f"late-{n}") for n in range(10)))

    assert ["create"] * PODS_BURST + ["drop"] * 50 == storm
    assert ["create"] * 2 + ["drop"] * 8 == later
    assert ["create"] == await posting.outcomes(FALLEN)


async def test_what_pods_make_us_say_of_the_node_hides_none_of_its_other_events():
    posting = Posting()
    refused = (NodeEvent("AllocationRefused", f"asks for {n} slice(s)", True) for n in range(99))

    assert ["create"] * BURST + ["drop"] * (99 - BURST) == await posting.outcomes(*refused)
    assert ["create"] == await posting.outcomes(FALLEN)


async def test_a_failed_write_costs_nothing_and_is_no_occurrence():
    posting = Posting()
    posting.api.is_lost = True
    for _ in range(BURST + 5):
        with pytest.raises(ApiError):
            await posting.poster.post(FALLEN)
    posting.api.is_lost = False

    assert ["create"] == await posting.outcomes(FALLEN)
    assert 1 == posting.api.counts[-1]
