"""Events of the scheduler: sent behind its verbs, one request for each, and not too many."""

import asyncio
from collections import Counter

from agent.sandbox.api_errors import ForbiddenError, Json
from agent.sandbox.scheduler.cluster import StoreCluster
from agent.sandbox.scheduler.events import EventQueue, EventRecorder
from agent.sandbox.scheduler.filter import NORMAL, Notice
from agent.sandbox.store import ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock, ManualClock
from tests.fakes.scheduler_cluster import RecordedCluster

POD: Json = {"metadata": {"namespace": "d", "name": "p", "uid": "u", "labels": {}}, "spec": {}}


class Slow(EventRecorder):
    """Takes one Event in each second."""

    def __init__(self) -> None:
        super().__init__(StoreCluster(ObjectStore(ManualClock(), Seeded())), ManualClock(), "slow")
        self.told: list[tuple[Json, str]] = []

    async def record(self, pod: Json, notice: Notice) -> None:
        await asyncio.sleep(1)
        self.told.append((pod, notice.message))


def notice(text: str) -> Notice:
    return Notice(NORMAL, "Told", text)


async def test_events_are_sent_in_their_order_by_who_runs_the_queue() -> None:
    slow = Slow()
    queue = EventQueue(slow)
    began = asyncio.get_running_loop().time()
    for text in ("one", "two"):
        await queue.record(POD, notice(text))
    assert began == asyncio.get_running_loop().time()

    async with asyncio.TaskGroup() as group:
        running = group.create_task(queue.run())
        await asyncio.sleep(2.5)
        running.cancel()

    assert ["one", "two"] == [text for _, text in slow.told]
    assert {"namespace": "d", "name": "p", "uid": "u"} == slow.told[0][0]["metadata"]


def recording() -> tuple[RecordedCluster, EventRecorder]:
    cluster = RecordedCluster(ObjectStore(ManualClock(), Seeded()))
    return cluster, EventRecorder(cluster, ManualClock(), "hami-scheduler")


async def test_an_event_is_one_request_also_when_it_comes_again() -> None:
    cluster, recorder = recording()

    for text in ("one", "two", "one", "one"):
        await recorder.record(POD, notice(text))

    assert {"create events": 2, "patch events": 2} == Counter(cluster.calls)


async def test_an_event_that_was_removed_is_written_anew() -> None:
    store = ObjectStore(LoopClock(), Seeded())
    recorder = EventRecorder(StoreCluster(store), LoopClock(), "hami-scheduler")
    await recorder.record(POD, notice("one"))
    (written,) = store.select("events")
    store.delete("events", "d", written["metadata"]["name"])
    await asyncio.sleep(1)

    await recorder.record(POD, notice("one"))
    await recorder.record(POD, notice("one"))

    assert [2] == [event["count"] for event in store.select("events")]


async def test_of_one_pod_no_more_than_twenty_five_events_come_at_once() -> None:
    cluster, recorder = recording()
    other: Json = {"metadata": POD["metadata"] | {"uid": "v"}}

    for number in range(30):
        await recorder.record(POD, notice(str(number)))
    await recorder.record(other, notice("other"))
    assert ["create events"] * 26 == cluster.calls

    await asyncio.sleep(301)
    await recorder.record(POD, notice("later"))
    assert ["create events"] * 27 == cluster.calls


async def test_an_event_that_is_refused_fails_nothing() -> None:
    class Refusing(StoreCluster):
        async def create(self, resource: str, namespace: str, obj: Json) -> None:
            raise ForbiddenError("events are forbidden")

    store = ObjectStore(ManualClock(), Seeded())

    await EventRecorder(Refusing(store), ManualClock(), "hami-scheduler").record(POD, notice("x"))

    assert [] == store.select("events")
