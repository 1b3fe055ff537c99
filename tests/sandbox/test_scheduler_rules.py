"""Rules of the scheduler model that no vector reaches: use, quotas, steering, lock, bind, queue."""

import asyncio
from collections.abc import Callable

import pytest
from typing_extensions import override

from agent.cluster import BIND_TIME, HANDSHAKE
from agent.hami.annotations import decode_node_lock
from agent.model import GpuUuid, Share
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.scheduler.filter import filter_pod
from agent.sandbox.scheduler.model import SchedulerSettings, read_steering
from agent.sandbox.scheduler.registry import Quotas, Reservation, Usage, read_offer
from agent.sandbox.scheduler.verbs import BindError, HamiVerbs
from agent.sandbox.store import Json, ObjectStore, TooManyRequestsError
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock
from tests.fakes.explain_rig import LOCK, REGISTER, a_gpu, report_of
from tests.fakes.scheduler_cluster import FakeCluster, RecordedCluster, register_of, scheduling
from tests.fakes.scheduler_vectors import build_pod

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")


def placed(*ends: int | None, **metadata: str) -> dict[str, object]:
    """A placed pod with an init container of 8000 MiB and another of 1000; how the first ended."""
    spec = {"initContainers": [{"name": "i"}], "containers": [{"name": "c"}]}
    pod = build_pod(spec)
    pod["metadata"] |= metadata
    pod["metadata"]["annotations"] = {
        "hami.io/vgpu-node": "n",
        "hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,8000,0:;GPU-a,NVIDIA,1000,0:;",
    }
    states = [{"running": {}} if end is None else {"terminated": {"exitCode": end}} for end in ends]
    pod["status"]["initContainerStatuses"] = [{"state": state} for state in states]
    return pod


def memory_after(*pods: dict[str, object]) -> int:
    usage = Usage()
    for pod in pods:
        usage.observe(pod)
    return usage.loads("n")[A].memory_mib


@pytest.mark.parametrize(
    ("news", "memory_mib"),
    [
        ([placed()], 8000),
        ([placed(), placed(1)], 8000),
        ([placed(), placed(None), placed(0)], 1000),
        ([placed(), placed(0), placed(None)], 1000),
        # A new scheduler counts the peak until it hears of the pod again.
        ([placed(0)], 8000),
        ([placed(0), placed(0)], 1000),
        ([placed(), placed(0, deletionTimestamp="2026-08-21T06:20:39Z")], 8000),
    ],
)
def test_the_peak_goes_for_good_with_the_news_that_the_init_containers_succeeded(
    news: list[dict[str, object]], memory_mib: int
) -> None:
    assert memory_mib == memory_after(*news)


# What the scheduler makes of things that come and go while pods wait.


def finish(store: ObjectStore) -> None:
    def finished(pod: Json) -> Json:
        pod["status"]["phase"] = "Succeeded"
        return pod

    store.update("pods", "default", "p1", finished)


def delete(store: ObjectStore) -> None:
    store.delete("pods", "default", "p1", grace=0)


@pytest.mark.parametrize("end", [finish, delete])
async def test_a_pod_that_ends_makes_room(end: Callable[[ObjectStore], None]) -> None:
    async with scheduling(FakeCluster("GPU-a")) as cluster:
        cluster.submit("p1", memory_mib=12000)
        await cluster.until(lambda: cluster.is_bound("p1"))
        cluster.unlock()
        cluster.submit("p2", memory_mib=12000)
        await cluster.until(lambda: cluster.condition("p2") != "")

        end(cluster.store)
        await cluster.until(lambda: cluster.is_bound("p2"))

        assert cluster.node()["hami.io/mutex.lock"].endswith(",default,p2")


async def test_a_pod_that_fitted_nowhere_is_tried_after_a_change_until_it_is_deleted() -> None:
    async with scheduling(FakeCluster("GPU-a")) as cluster:

        async def attempts_after(beat: str) -> int:
            patch = {"metadata": {"annotations": {"beat": beat}}}
            cluster.store.update("nodes", "", "n1", lambda node: merge_patch(node, patch))
            await asyncio.sleep(1)
            failed = [one["reason"] for one in cluster.store.select("events")]
            return failed.count("FailedScheduling")

        cluster.submit("p", memory_mib=99_000)
        await cluster.until(lambda: cluster.condition("p") != "")
        before = await attempts_after("0")
        assert before + 1 == await attempts_after("1")

        cluster.store.delete("pods", "default", "p", grace=0)
        assert before + 1 == await attempts_after("2")


GREAT = {REGISTER: report_of(a_gpu("GPU-a", memory_mib=40_000))}
ASKED, UNASKED = {HANDSHAKE: "Requesting_"}, {HANDSHAKE: None}


@pytest.mark.parametrize(
    ("settings", "marks", "nodes", "least", "most"),
    [
        # HAMi's own mark on the Node tells kube-scheduler that something may be new.
        (SchedulerSettings(), GREAT | UNASKED, 1, 10, 17),
        (SchedulerSettings(), GREAT | ASKED, 1, 300, 302),
        (SchedulerSettings(), GREAT | ASKED, 2, 0, 2),
        (SchedulerSettings(eager=True), GREAT | ASKED, 1, 0, 2),
    ],
)
async def test_a_changed_node_is_read_after_15_s_or_when_another_comes(
    settings: SchedulerSettings, marks: Json, nodes: int, least: float, most: float
) -> None:
    async with scheduling(FakeCluster("GPU-a", settings=settings)) as cluster:
        cluster.submit("p", memory_mib=30_000)
        await cluster.until(lambda: cluster.condition("p") != "")
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        patch = {"metadata": {"annotations": marks}}
        cluster.store.update("nodes", "", "n1", lambda node: merge_patch(node, patch))
        if nodes > 1:
            cluster.store.create("nodes", {"metadata": {"name": "n2", "annotations": ASKED}})
        await cluster.until(lambda: cluster.is_bound("p"), 400)

        assert least <= asyncio.get_running_loop().time() - began <= most


async def test_a_restarted_scheduler_counts_what_was_placed_before() -> None:
    cluster = FakeCluster("GPU-a")
    async with scheduling(cluster):
        cluster.submit("p1", memory_mib=12000)
        await cluster.until(lambda: cluster.is_bound("p1"))
    cluster.unlock()

    async with scheduling(FakeCluster("GPU-a", store=cluster.store)):
        cluster.submit("p2", memory_mib=12000)
        await cluster.until(lambda: cluster.condition("p2") != "")

        expected = "0/1 nodes are available: 1 1/1 CardInsufficientMemory."
        assert expected == cluster.condition("p2")
        told = {one["reason"] for one in cluster.store.select("events")}
        assert {"FilteringFailed", "FailedScheduling"} <= told


# ResourceQuotas as HAMi counts them: what pods of a namespace hold, against two limits.


def quota(name: str, **hard: object) -> Json:
    return {"metadata": {"name": name, "namespace": "default"}, "spec": {"hard": hard}}


@pytest.mark.parametrize(
    ("namespace", "factor", "asked_for", "fits"),
    [
        ("default", 1, (500, 30), True),
        ("default", 1, (501, 0), False),
        ("default", 1, (0, 31), False),
        ("other", 1, (1500, 50), True),
        # The factor multiplies the limit of the memory alone.
        ("default", 4, (5000, 30), True),
        ("default", 4, (5001, 0), False),
        ("default", 4, (0, 31), False),
    ],
)
def test_what_a_namespace_holds_and_what_is_asked_may_reach_the_limit(
    namespace: str, factor: int, asked_for: tuple[int, int], *, fits: bool
) -> None:
    usage = Usage()
    usage.reserve("u", Reservation("n1", [[Share(A, 1000, 20)]], 0, namespace=namespace))
    quotas, cores = Quotas(usage, factor), {"limits.nvidia.com/gpucores": 50}
    quotas.see("ADDED", quota("q", **cores, **{"limits.nvidia.com/gpumem": 1500}))

    assert fits == quotas.fits("default", *asked_for)


def asked(count: int, memory_mib: int) -> Json:
    limits = {"nvidia.com/gpu": count, "nvidia.com/gpumem": memory_mib}
    return {"name": f"c{memory_mib}", "limits": limits}


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({"containers": [asked(1, 600)]}, True),
        ({"containers": [asked(1, 600), asked(1, 401)]}, False),
        ({"containers": [asked(2, 501)]}, False),
        ({"initContainers": [asked(1, 1000), asked(1, 900)], "containers": [asked(1, 600)]}, True),
        ({"initContainers": [asked(1, 1001)], "containers": [asked(1, 1)]}, False),
    ],
)
def test_a_pod_counts_by_its_greatest_moment(spec: Json, *, fits: bool) -> None:
    quotas = Quotas(Usage(), 1)
    quotas.see("ADDED", quota("q", **{"limits.nvidia.com/gpumem": 1000}))
    offer = read_offer({REGISTER: register_of("GPU-a", "GPU-b")})
    assert offer is not None
    nodes = {"n1": offer}
    pod = build_pod(spec)

    filtered = filter_pod(pod, ["n1"], nodes, SchedulerSettings(), Seeded(), quotas)

    assert fits == bool(filtered.nodes)
    assert fits is ("ResourceQuotaNotFit" not in filtered.failed.get("n1", ""))


# How a pod's annotations steer the choice of GPUs, in the corners that no vector reaches.


@pytest.mark.parametrize(
    ("wish", "text", "admitted"),
    [
        ("vgpu-mode", "", False),
        ("vgpu-mode", "mig,hami-core", True),
        ("use-gputype", " ", True),
        ("use-gputype", " , ", False),
        ("use-gputype", "t4", True),
        ("use-gpuuuid", "", True),
        ("use-gpuuuid", ",", False),
        ("use-gpuuuid", " GPU-a ,x", True),
    ],
)
def test_a_list_of_commas_alone_admits_no_gpu(wish: str, text: str, *, admitted: bool) -> None:
    found, gpu = read_steering({f"nvidia.com/{wish}": text}, SchedulerSettings()), a_gpu("GPU-a")
    assert admitted == (found.admits_type(gpu) and found.admits_uuid(gpu))


# Lock, bind and the client's queue.


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [(SchedulerSettings(), 6, 25), (SchedulerSettings().quick(), 0, 0)],
)
async def test_in_a_burst_the_clients_queue_lies_between_bind_time_and_the_stamp_of_the_lock(
    settings: SchedulerSettings, least: int, most: int
) -> None:
    gaps: dict[str, float] = {}
    names = [f"p{number}" for number in range(14)]
    async with scheduling(FakeCluster("GPU-a", "GPU-b", settings=settings)) as cluster:

        def served() -> bool:
            """What an agent does: it frees the lock of a pod that is bound."""
            for name in filter(cluster.is_bound, names):
                if name not in gaps:
                    bound = int(cluster.pod(name)["metadata"]["annotations"][BIND_TIME])
                    gaps[name] = decode_node_lock(cluster.node()[LOCK]).stamp.timestamp() - bound
                    cluster.unlock()
            return len(gaps) == len(names)

        for name in names:
            cluster.submit(name)
        await cluster.until(served)

    assert least <= max(gaps.values()) <= most
    assert min(gaps.values()) <= 1


# What others do between two steps of the scheduler; it is as blind to it as HAMi's is.

Others = Callable[["Interrupted"], object]


def a_pod(name: str) -> Json:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
    return build_pod({"containers": [{"name": "c", "limits": limits}]}, name)


class Interrupted(RecordedCluster):
    """A Node and two pods; others act before each patch of the Node."""

    def __init__(self, others: Others | None = None) -> None:
        super().__init__(ObjectStore(ManualClock(), Seeded()))
        self.others = others
        # HAMi writes nothing on such a Node when it sees it.
        asked_for = {"hami.io/node-handshake": "Requesting_"}
        self.store.create("nodes", {"metadata": {"name": "n1", "annotations": asked_for}})
        for name in ("p", "other"):
            self.store.create("pods", a_pod(name))

    async def before(self, call: str) -> None:
        if call == "patch nodes" and self.others is not None:
            self.others(self)

    def marks(self, resource: str, name: str) -> Json:
        namespace = "default" if resource == "pods" else ""
        return dict(self.store.get(resource, namespace, name)["metadata"]["annotations"])

    async def bind(self) -> None:
        pod = self.store.get("pods", "default", "p")
        hami = HamiVerbs(self, ManualClock(), Seeded(), SchedulerSettings().quick())
        await hami.see_node("ADDED", self.store.get("nodes", "", "n1"))
        hami.see_pod("ADDED", pod)
        await hami.bind("default", "p", pod["metadata"]["uid"], "n1")


async def test_a_bind_makes_six_requests_and_a_repeated_one_gives_the_lock_away() -> None:
    cluster = Interrupted()

    await cluster.bind()

    expected = [*["get nodes"] * 3, "patch nodes", "patch pods", "bind pods"]
    assert expected == cluster.calls
    assert cluster.marks("nodes", "n1")[LOCK].endswith(",default,p")
    with pytest.raises(BindError, match='already assigned to node "n1"'):
        await cluster.bind()
    assert LOCK not in cluster.marks("nodes", "n1")
    assert "allocating" == cluster.marks("pods", "p")["hami.io/bind-phase"]


class Refusing(Interrupted):
    """Refuses the read in the first try to write the lock (pkg/util/nodelock, SetNodeLock)."""

    @override
    async def before(self, call: str) -> None:
        if [call, self.calls.count(call)] == ["get nodes", 3]:
            raise TooManyRequestsError("later")


async def test_a_refused_read_of_the_lock_is_a_try_as_a_refused_write_is() -> None:
    cluster = Refusing()

    await cluster.bind()

    expected = [*["get nodes"] * 4, "patch nodes", "patch pods", "bind pods"]
    assert expected == cluster.calls


TAKEN = "2026-08-21T06:20:39Z,default,other"


def lock_for_another(cluster: Interrupted) -> None:
    patch = {"metadata": {"annotations": {LOCK: TAKEN}}}
    cluster.store.update("nodes", "", "n1", lambda node: merge_patch(node, patch))


def bind_elsewhere_and_remove_the_node(cluster: Interrupted) -> None:
    cluster.store.bind("default", "p", "n2")
    cluster.others = lambda _: cluster.store.delete("nodes", "", "n1")


def remove(cluster: Interrupted) -> None:
    cluster.store.delete("pods", "default", "p", grace=0)
    cluster.others = None


def make_again(cluster: Interrupted) -> None:
    remove(cluster)
    cluster.store.create("pods", a_pod("p"))


@pytest.mark.parametrize(
    ("meanwhile", "refusal", "lock"),
    [
        (lock_for_another, "is locked: node lock contention", TAKEN),
        # The lock cannot be given back, and the first failure is told.
        (bind_elsewhere_and_remove_the_node, 'already assigned to node "n2"', None),
        (make_again, "UID", ""),
        (remove, 'pods "p" not found', ""),
    ],
)
async def test_what_others_do_meanwhile_fails_the_bind_and_its_lock_is_given_back(
    meanwhile: Others, refusal: str, lock: str | None
) -> None:
    cluster = Interrupted(meanwhile)

    with pytest.raises(BindError, match=refusal):
        await cluster.bind()

    assert lock is None or lock == cluster.marks("nodes", "n1").get(LOCK, "")
    if meanwhile is make_again:
        assert "allocating" == cluster.marks("pods", "p")["hami.io/bind-phase"]
