"""What others do between two steps of the scheduler."""

import asyncio
from collections.abc import Callable

import pytest

from agent.sandbox.api_errors import ForbiddenError, Json
from agent.sandbox.patching import merge_patch
from agent.sandbox.scheduler.bind import Binder, BindError
from agent.sandbox.scheduler.cluster import StoreCluster
from agent.sandbox.scheduler.events import EventRecorder
from agent.sandbox.scheduler.filter import NORMAL, Notice
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.usage import Usage
from agent.sandbox.store import ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock
from tests.fakes.scheduler_cluster import LOCK
from tests.fakes.scheduler_vectors import build_pod

GPU = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
NOTICE = Notice(NORMAL, "Told", "once more")


class Interrupted(StoreCluster):
    """Others act before each patch of a node, or between the read and the writing of an event."""

    def __init__(self, store: ObjectStore, others: Callable[[ObjectStore], None]) -> None:
        super().__init__(store)
        self.store = store
        self.others = others
        self.patches = 0

    async def patch(
        self,
        resource: str,
        namespace: str,
        name: str,
        changes: Json,
        *,
        uid: str | None = None,
        version: str | None = None,
    ) -> Json:
        if resource == "nodes":
            self.patches += 1
            self.others(self.store)
        return await super().patch(resource, namespace, name, changes, uid=uid, version=version)

    async def create(self, resource: str, namespace: str, obj: Json) -> None:
        self.others(self.store)
        await super().create(resource, namespace, obj)


def filled() -> ObjectStore:
    store = ObjectStore(ManualClock(), Seeded())
    store.create("nodes", {"metadata": {"name": "n1", "annotations": {"beat": "0"}}})
    for name in ("p", "other"):
        store.create("pods", build_pod({"containers": [{"name": "c", "limits": GPU}]}, name))
    return store


def annotate(store: ObjectStore, **marks: str) -> None:
    patch = {"metadata": {"annotations": marks}}
    store.update("nodes", "", "n1", lambda node: merge_patch(node, patch))


async def bind(cluster: Interrupted) -> None:
    binder = Binder(cluster, ManualClock(), SchedulerSettings(), Usage(), Seeded())
    uid = cluster.store.get("pods", "default", "p")["metadata"]["uid"]
    await binder.bind("default", "p", uid, "n1")


def lock(store: ObjectStore) -> str:
    held: str = store.get("nodes", "", "n1")["metadata"]["annotations"].get(LOCK, "")
    return held


async def test_a_lock_that_another_pod_takes_meanwhile_is_respected() -> None:
    taken = "2026-08-21T06:20:39Z,default,other"
    cluster = Interrupted(filled(), lambda store: annotate(store, **{LOCK: taken}))

    with pytest.raises(BindError, match="node lock contention"):
        await bind(cluster)

    assert taken == lock(cluster.store)


async def test_a_node_that_changes_meanwhile_is_read_again() -> None:
    cluster = Interrupted(filled(), lambda store: None)
    cluster.others = lambda store: annotate(store, beat=str(min(cluster.patches, 3)))

    await bind(cluster)

    assert 4 == cluster.patches
    assert lock(cluster.store).endswith(",default,p")


async def test_a_node_that_never_rests_is_given_up_after_five_tries() -> None:
    cluster = Interrupted(filled(), lambda store: None)
    cluster.others = lambda store: annotate(store, beat=str(cluster.patches))
    began = asyncio.get_running_loop().time()

    with pytest.raises(BindError, match="the object has been modified"):
        await bind(cluster)

    assert 5 == cluster.patches
    assert 1.5 <= asyncio.get_running_loop().time() - began <= 2.25


async def test_a_lock_that_cannot_be_given_back_leaves_the_first_failure() -> None:
    store = filled()
    store.bind("default", "p", "n2")
    cluster = Interrupted(store, lambda store: None)

    def vanish(store: ObjectStore) -> None:
        if cluster.patches == 2:
            store.delete("nodes", "", "n1")

    cluster.others = vanish

    with pytest.raises(BindError, match='already assigned to node "n2"'):
        await bind(cluster)


async def test_an_event_that_was_written_meanwhile_is_counted_on() -> None:
    store = filled()
    pod = store.get("pods", "default", "p")
    plain = EventRecorder(StoreCluster(store), ManualClock(), "hami-scheduler")
    await plain.record(pod, NOTICE)
    (written,) = store.select("events")
    store.delete("events", "default", written["metadata"]["name"])

    def tell_first(store: ObjectStore) -> None:
        store.create("events", written)

    cluster = Interrupted(store, tell_first)
    await EventRecorder(cluster, ManualClock(), "hami-scheduler").record(pod, NOTICE)

    assert [2] == [event["count"] for event in store.select("events")]


async def test_an_event_that_is_refused_fails_nothing() -> None:
    def refuse(_: ObjectStore) -> None:
        raise ForbiddenError("events are forbidden")

    store = filled()
    recorder = EventRecorder(Interrupted(store, refuse), ManualClock(), "hami-scheduler")

    await recorder.record(store.get("pods", "default", "p"), NOTICE)

    assert [] == store.select("events")
