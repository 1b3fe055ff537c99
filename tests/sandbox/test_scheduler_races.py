"""What others do between two steps of the scheduler; it is as blind to it as HAMi's is."""

import asyncio
from collections.abc import Callable

import pytest

from agent.sandbox.api_errors import Json, StatusError
from agent.sandbox.patching import merge_patch
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.verbs import BindError, HamiVerbs
from agent.sandbox.store import ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock
from tests.fakes.scheduler_cluster import LOCK, RecordedCluster
from tests.fakes.scheduler_vectors import build_pod

GPU = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
Others = Callable[["Interrupted"], None]


class Interrupted(RecordedCluster):
    """Others act before each patch of a node."""

    def __init__(self, others: Others | None = None) -> None:
        super().__init__(filled())
        self.others = others

    @property
    def patches(self) -> int:
        return self.calls.count("patch nodes")

    async def before(self, call: str) -> None:
        if call == "patch nodes" and self.others is not None:
            self.others(self)

    def annotate(self, **marks: str) -> None:
        patch = {"metadata": {"annotations": marks}}
        self.store.update("nodes", "", "n1", lambda node: merge_patch(node, patch))

    def lock(self) -> str:
        held: str = self.store.get("nodes", "", "n1")["metadata"]["annotations"].get(LOCK, "")
        return held

    def marks(self, name: str = "p") -> Json:
        return dict(self.store.get("pods", "default", name)["metadata"].get("annotations") or {})


class SilentStore(Interrupted):
    """The binding is made, and its answer is lost."""

    async def bind(self, namespace: str, name: str, uid: str, node_name: str) -> None:
        await super().bind(namespace, name, uid, node_name)
        raise StatusError("no answer")


def a_pod(name: str) -> Json:
    return build_pod({"containers": [{"name": "c", "limits": GPU}]}, name)


def filled() -> ObjectStore:
    store = ObjectStore(ManualClock(), Seeded())
    store.create("nodes", {"metadata": {"name": "n1", "annotations": {"beat": "0"}}})
    for name in ("p", "other"):
        store.create("pods", a_pod(name))
    return store


async def bind(cluster: Interrupted, name: str = "p") -> None:
    pod = cluster.store.get("pods", "default", name)
    hami = HamiVerbs(cluster, ManualClock(), Seeded(), SchedulerSettings().quick(), eager=False)
    hami._seen.see("nodes", "ADDED", cluster.store.get("nodes", "", "n1"))
    hami._seen.see("pods", "ADDED", pod)
    await hami.bind("default", name, pod["metadata"]["uid"], "n1")


async def test_a_bind_makes_six_requests_in_hamis_order() -> None:
    cluster = Interrupted()

    await bind(cluster)

    expected = [*["get nodes"] * 3, "patch nodes", "patch pods", "bind"]
    assert expected == cluster.calls


async def test_a_bind_that_finds_the_lock_taken_makes_three_requests() -> None:
    cluster = Interrupted()
    await bind(cluster, "other")
    cluster.calls.clear()

    with pytest.raises(BindError, match="has been locked within 5m0s: node lock contention"):
        await bind(cluster)

    assert ["get nodes", "get pods", "get nodes"] == cluster.calls


async def test_a_lock_that_another_pod_takes_meanwhile_is_respected() -> None:
    taken = "2026-08-21T06:20:39Z,default,other"
    cluster = Interrupted(lambda cluster: cluster.annotate(**{LOCK: taken}))

    with pytest.raises(BindError, match=r"^failed to set node lock .* is locked: node lock cont"):
        await bind(cluster)

    assert taken == cluster.lock()


async def test_a_node_that_changes_meanwhile_is_read_again() -> None:
    cluster = Interrupted(lambda cluster: cluster.annotate(beat=str(min(cluster.patches, 3))))

    await bind(cluster)

    assert 4 == cluster.patches
    assert cluster.lock().endswith(",default,p")


async def test_a_node_that_never_rests_is_given_up_after_five_tries() -> None:
    cluster = Interrupted(lambda cluster: cluster.annotate(beat=str(cluster.patches)))
    began = asyncio.get_running_loop().time()

    with pytest.raises(BindError, match="the object has been modified"):
        await bind(cluster)

    assert 5 == cluster.patches
    assert 1.5 <= asyncio.get_running_loop().time() - began <= 2.25


async def test_a_lock_that_cannot_be_given_back_leaves_the_first_failure() -> None:
    def vanish(cluster: Interrupted) -> None:
        if cluster.patches == 1:
            cluster.store.bind("default", "p", "n2")
        if cluster.patches == 2:
            cluster.store.delete("nodes", "", "n1")

    cluster = Interrupted(vanish)

    with pytest.raises(BindError, match='already assigned to node "n2"'):
        await bind(cluster)


async def test_a_bind_that_is_repeated_fails_and_gives_the_lock_away() -> None:
    cluster = Interrupted()
    await bind(cluster)
    assert cluster.lock().endswith(",default,p")

    with pytest.raises(BindError, match='already assigned to node "n1"'):
        await bind(cluster)

    assert "" == cluster.lock()
    assert "allocating" == cluster.marks()["hami.io/bind-phase"]


async def test_a_binding_whose_answer_was_lost_gives_the_lock_away() -> None:
    cluster = SilentStore()

    with pytest.raises(BindError, match="no answer"):
        await bind(cluster)

    assert "n1" == cluster.store.get("pods", "default", "p")["spec"]["nodeName"]
    assert "" == cluster.lock()


async def test_a_pod_that_was_made_again_meanwhile_gets_the_marks_and_loses_the_lock() -> None:
    def replace(cluster: Interrupted) -> None:
        if cluster.patches == 1:
            cluster.store.delete("pods", "default", "p", grace=0)
            cluster.store.create("pods", a_pod("p"))

    cluster = Interrupted(replace)

    with pytest.raises(BindError, match="UID"):
        await bind(cluster)

    assert "allocating" == cluster.marks()["hami.io/bind-phase"]
    assert "" == cluster.lock()


async def test_the_lock_of_a_pod_that_went_meanwhile_is_given_back() -> None:
    def remove(cluster: Interrupted) -> None:
        if cluster.patches == 1:
            cluster.store.delete("pods", "default", "p", grace=0)

    cluster = Interrupted(remove)

    with pytest.raises(BindError, match='pods "p" not found'):
        await bind(cluster)

    assert "" == cluster.lock()


async def test_a_failed_bind_of_a_pod_without_a_lock_leaves_the_lock_of_its_name() -> None:
    cluster = Interrupted()
    init = {"initContainers": [{"name": "i", "limits": GPU}], "containers": [{"name": "c"}]}
    cluster.store.create("pods", build_pod(init, "init"))
    held = "2026-08-21T06:20:39Z,default,init"
    cluster.annotate(**{LOCK: held})
    cluster.store.bind("default", "init", "n2")

    with pytest.raises(BindError, match='already assigned to node "n2"'):
        await bind(cluster, "init")

    assert held == cluster.lock()
