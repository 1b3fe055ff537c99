"""What others do between two steps of the scheduler."""

import asyncio
from collections.abc import Callable

import pytest

from agent.sandbox.api_errors import ForbiddenError, Json, StatusError
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


class Silent(Interrupted):
    """The binding is made; neither it nor any question about the pod is answered after that."""

    is_silent = False

    async def get(self, resource: str, namespace: str, name: str) -> Json:
        if self.is_silent and resource == "pods":
            raise StatusError("no answer")
        return await super().get(resource, namespace, name)

    async def bind(self, namespace: str, name: str, uid: str, node_name: str) -> None:
        await super().bind(namespace, name, uid, node_name)
        self.is_silent = True
        raise StatusError("no answer")


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
    clock, settings = ManualClock(), SchedulerSettings()
    events = EventRecorder(cluster, clock, settings.scheduler_name)
    binder = Binder(cluster, clock, settings, Usage(), Seeded(), events)
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


async def test_a_pod_that_gets_the_node_meanwhile_is_bound_and_keeps_the_lock() -> None:
    cluster = Interrupted(filled(), lambda store: None)
    cluster.others = lambda store: bind_once(store, cluster, "n1")

    await bind(cluster)

    assert lock(cluster.store).endswith(",default,p")
    assert ["BindingSucceed"] == [event["reason"] for event in cluster.store.select("events")]


async def test_a_pod_that_gets_another_node_meanwhile_gives_the_lock_back() -> None:
    cluster = Interrupted(filled(), lambda store: None)
    cluster.others = lambda store: bind_once(store, cluster, "n2")

    with pytest.raises(BindError, match='already assigned to node "n2"'):
        await bind(cluster)

    assert "" == lock(cluster.store)


async def test_the_lock_stays_while_nobody_knows_what_became_of_the_binding() -> None:
    cluster = Silent(filled(), lambda store: None)

    with pytest.raises(BindError, match="no answer"):
        await bind(cluster)
    held = lock(cluster.store)
    cluster.is_silent = False
    await bind(cluster)

    assert held.endswith(",default,p")
    assert held == lock(cluster.store)


async def test_the_lock_of_a_pod_that_went_meanwhile_is_given_back() -> None:
    cluster = Interrupted(filled(), lambda store: None)

    def remove(store: ObjectStore) -> None:
        if cluster.patches == 1 and store.select("pods", fields={"metadata.name": "p"}):
            store.delete("pods", "default", "p", grace=0)

    cluster.others = remove

    with pytest.raises(BindError, match='pods "p" not found'):
        await bind(cluster)

    assert "" == lock(cluster.store)


async def test_a_pod_of_the_same_name_that_was_bound_meanwhile_keeps_its_lock() -> None:
    cluster = Interrupted(filled(), lambda store: None)

    def replace(store: ObjectStore) -> None:
        if cluster.patches == 1 and not store.select("events"):
            store.delete("pods", "default", "p", grace=0)
            store.create("pods", build_pod({"containers": [{"name": "c", "limits": GPU}]}, "p"))
            store.bind("default", "p", "n1")

    cluster.others = replace

    with pytest.raises(BindError, match="UID"):
        await bind(cluster)

    assert lock(cluster.store).endswith(",default,p")


def bind_once(store: ObjectStore, cluster: Interrupted, node: str) -> None:
    """Bind the pod to a node just before the lock is written."""
    if cluster.patches == 1 and "nodeName" not in store.get("pods", "default", "p")["spec"]:
        store.bind("default", "p", node)


async def test_a_lock_that_cannot_be_given_back_leaves_the_first_failure() -> None:
    cluster = Interrupted(filled(), lambda store: None)

    def vanish(store: ObjectStore) -> None:
        bind_once(store, cluster, "n2")
        if cluster.patches == 2 and store.select("nodes"):
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
