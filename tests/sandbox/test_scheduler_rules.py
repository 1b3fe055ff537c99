"""Rules of the scheduler model that no vector reaches."""

import asyncio
import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest

from agent.allocate.room import ContainerRequest
from agent.hami.annotations import RegisteredGpu
from agent.model import GpuUuid, Share
from agent.sandbox.scheduler.filter import Wishes, filter_pod, fit_pod
from agent.sandbox.scheduler.model import (
    BadWeightsError,
    GpuView,
    RegisteredNode,
    SchedulerSettings,
    Steering,
    parse_quantity,
    read_steering,
)
from agent.sandbox.scheduler.registry import Registry, Version, read_offer
from agent.sandbox.scheduler.usage import Quotas, Reservation, Usage
from agent.sandbox.scheduler.webhook import review_pod
from agent.sandbox.store import Json, ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import START
from tests.fakes.scheduler_cluster import REGISTER, FakeCluster, register_of, scheduling
from tests.fakes.scheduler_vectors import build_pod

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")


@pytest.mark.parametrize(
    ("text", "number"), [("5", 5), ("2Ki", 2048), ("2000m", 2), ("1.5", None), ("", None)]
)
def test_a_quantity_is_a_whole_number_or_nothing(text: str, number: int | None) -> None:
    assert number == parse_quantity(text)


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
    async with scheduling(FakeCluster("GPU-a", eager=True)) as cluster:
        cluster.submit("p1", memory_mib=12000)
        await cluster.until(lambda: cluster.is_bound("p1"))
        cluster.unlock()
        cluster.submit("p2", memory_mib=12000)
        await cluster.until(lambda: cluster.condition("p2") != "")

        end(cluster.store)
        await cluster.until(lambda: cluster.is_bound("p2"))

        assert cluster.node()["hami.io/mutex.lock"].endswith(",default,p2")


async def test_a_restarted_scheduler_counts_what_was_placed_before() -> None:
    cluster = FakeCluster("GPU-a")
    async with scheduling(cluster):
        cluster.submit("p1", memory_mib=12000)
        await cluster.until(lambda: cluster.is_bound("p1"))
    cluster.unlock()

    async with scheduling(cluster.restarted()):
        cluster.submit("p2", memory_mib=12000)
        await cluster.until(lambda: cluster.condition("p2") != "")

        expected = "0/1 nodes are available: 1 1/1 CardInsufficientMemory."
        assert expected == cluster.condition("p2")
        assert {"FilteringFailed", "FailedScheduling"} == set(cluster.reasons("p2"))


async def test_a_changed_annotation_is_seen_within_fifteen_seconds() -> None:
    async with scheduling(FakeCluster("GPU-a")) as cluster:
        await asyncio.sleep(1)
        cluster.annotate_node(register=register_of("GPU-a", healthy=False))
        cluster.submit("early")
        await cluster.until(lambda: cluster.is_bound("early"))

        await asyncio.sleep(15)
        cluster.submit("late")
        await cluster.until(lambda: cluster.condition("late") != "")

        assert "0/1 nodes are available: 1 1/1 CardNotHealth." == cluster.condition("late")


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
    nodes = {"n1": offer.state("n1", {})}
    pod = build_pod(spec)

    filtered = filter_pod(pod, ["n1"], nodes, SchedulerSettings(), Seeded(), quotas)

    assert fits == bool(filtered.nodes)
    assert fits == review_pod(pod, SchedulerSettings(), quotas).is_allowed
    if not fits:
        assert "ResourceQuotaNotFit" in filtered.failed["n1"]


# How a pod's annotations steer the choice of GPUs, in the corners that no vector reaches.

WEIGHTS = "hami.io/device-scoring-weights"
POLICY = "hami.io/gpu-scheduler-policy"
TOPOLOGY = {POLICY: "topology-aware"}
UUIDS = tuple(GpuUuid(f"GPU-{name}") for name in "abc")


def steering(**annotations: str) -> Steering:
    return read_steering(annotations, SchedulerSettings())


def gpu(uuid: GpuUuid, numa: int = 0) -> RegisteredGpu:
    return RegisteredGpu(
        uuid=uuid,
        index=UUIDS.index(uuid),
        split_count=10,
        registered_mib=16000,
        core_percent=100,
        type_name="NVIDIA-Tesla T4",
        mode="hami-core",
        numa=numa,
        healthy=True,
    )


def fitted(annotations: dict[str, str], count: int, node: RegisteredNode) -> tuple[list[str], str]:
    """UUIDs that one container of so many GPUs gets, or the reason."""
    wishes = Wishes(
        (ContainerRequest(count, 1000, 101, 0),), 0, read_steering(annotations, SchedulerSettings())
    )
    answer = fit_pod(node, wishes)
    groups: tuple[tuple[Share, ...], ...] = answer.groups or ((),)
    return [share.uuid for share in groups[0]], answer.reason


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("slot=1", "expected slot, core, and memory weights"),
        ("slot=1,core=1,memory", "expected key=value entries"),
        ("slot=1,slot=1,memory=1", 'duplicate "slot" weight'),
        ("slot=a,core=1,memory=1", '"slot" weight must be an integer'),
        (f"slot={2**63},core=1,memory=1", '"slot" weight must be an integer'),
        (f"slot={'9' * 5000},core=1,memory=1", '"slot" weight must be an integer'),
        ("slot=-1,core=1,memory=1", '"slot" weight must not be negative'),
        ("slot=1,core=1,fans=1", 'unknown weight "fans"'),
        ("slot=0,core=0,memory=0", "at least one weight must be positive"),
    ],
)
def test_weights_are_refused_in_the_words_of_hami(text: str, detail: str) -> None:
    with pytest.raises(BadWeightsError) as refusal:
        steering(**{WEIGHTS: text})

    assert f'invalid {WEIGHTS} annotation "{text}": {detail}' == str(refusal.value)


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
    found = steering(**{f"nvidia.com/{wish}": text})
    assert admitted == (found.admits_type(gpu(UUIDS[0])) and found.admits_uuid(gpu(UUIDS[0])))


LINKED = RegisteredNode(
    "n",
    tuple(GpuView(gpu(uuid)) for uuid in UUIDS),
    links={
        UUIDS[0]: {UUIDS[1]: 100, UUIDS[2]: 10},
        UUIDS[1]: {UUIDS[0]: 100, UUIDS[2]: 20},
        UUIDS[2]: {UUIDS[0]: 10, UUIDS[1]: 20},
    },
)


BARE = RegisteredNode("n", LINKED.gpus)
TWO_NUMAS = RegisteredNode(
    "n", tuple(GpuView(gpu(uuid, numa)) for uuid, numa in zip(UUIDS, (0, 0, 1), strict=True))
)
BOUND = TOPOLOGY | {"nvidia.com/numa-bind": "true"}


@pytest.mark.parametrize(
    ("wish", "count", "node", "expected", "reason"),
    [
        # One GPU is the worst connected, and several are the best.
        (TOPOLOGY, 1, LINKED, ["GPU-c"], ""),
        (TOPOLOGY, 2, LINKED, ["GPU-b", "GPU-a"], ""),
        (TOPOLOGY, 3, LINKED, ["GPU-c", "GPU-b", "GPU-a"], ""),
        # It goes with another policy.
        ({POLICY: "binpack, topology-aware"}, 2, LINKED, ["GPU-b", "GPU-a"], ""),
        # Without links all pairs are equal.
        (TOPOLOGY, 2, BARE, ["GPU-c", "GPU-b"], ""),
        (TOPOLOGY, 1, BARE, ["GPU-c"], ""),
        # With NUMA binding the last NUMA node alone is chosen from.
        (BOUND, 2, TWO_NUMAS, ["GPU-b", "GPU-a"], ""),
        (BOUND, 3, TWO_NUMAS, [], "2/3 AllocatedCardsInsufficientRequest"),
    ],
)
def test_gpus_are_chosen_by_their_links(
    wish: dict[str, str], count: int, node: RegisteredNode, expected: list[str], reason: str
) -> None:
    assert (expected, reason) == fitted(wish, count, node)


# What each version of HAMi's scheduler takes from a Node, and when it looks again.

HANDSHAKE = "hami.io/node-handshake"
JSON = '[{"id":"GPU-a","count":10%s}]'
HEALTHY, ILL = JSON % ',"health":true', JSON % ""
COLON = "GPU-a,10,1,100,NVIDIA-T4,0,%s,0,hami-core:"
SEVEN = "GPU-a,10,1,100,NVIDIA-T4,0,%s:"
SECOND = dt.timedelta(seconds=1)


def a_node(register: str, handshake: str = "", allocatable: str = "10") -> dict[str, Any]:
    annotations = {REGISTER: register, HANDSHAKE: handshake}
    return {
        "metadata": {"name": "n1", "annotations": {k: v for k, v in annotations.items() if v}},
        "status": {"allocatable": {"nvidia.com/gpu": allocatable}},
    }


def stamped(word: str, seconds_ago: int) -> str:
    return f"{word}_{START - seconds_ago * SECOND:%Y-%m-%d %H:%M:%S}"


def offered(registry: Registry) -> bool | None:
    """Whether the node's GPU is offered as healthy; None: the node is not in the cache."""
    state = registry.state("n1", {})
    return None if state is None else state.gpus[0].capacity.healthy


REQUESTED = stamped("Requesting", 600)
ASKED, DROPPED = stamped("Requesting", 0), stamped("Deleted", 0)
GOOD, BAD = COLON % "true", COLON % "false"
V7, V8, V9, V10 = Version


@pytest.mark.parametrize(
    ("version", "steps"),
    [
        # Up to 2.7.1 every stamp of the agent is a reason to read, and no other form is read.
        (V7, [(GOOD, "Reported x", "10", ASKED, True), (BAD, ASKED, "10", "", True)]),
        (V7, [(GOOD, "Reported x", "10", ASKED, True), (BAD, "Reported y", "10", ASKED, False)]),
        (V7, [(SEVEN % "true", "Reported x", "10", ASKED, True)]),
        (V7, [(HEALTHY, "Reported x", "10", "", None)]),
        (V8, [(GOOD, "Reported x", "10", "", None)]),
        # A minute of silence drops the node until it speaks again.
        (
            V7,
            [
                (GOOD, "Reported x", "10", ASKED, True),
                (GOOD, stamped("Requesting", 59), "10", "", True),
                (GOOD, stamped("Requesting", 60), "10", DROPPED, None),
                (GOOD, stamped("Deleted", 600), "10", "", None),
                (GOOD, "Reported y", "10", ASKED, True),
                (GOOD, "Requesting_soon", "10", DROPPED, None),
            ],
        ),
        # 2.8 reads again when the count changed, and for no other reason.
        (V8, [(HEALTHY, "", "10", "", True), (ILL, "Reported x", "10", "", True)]),
        (V8, [(HEALTHY, "", "10", "", True), (ILL, "Reported x", "9", "", False)]),
        # 2.9 also does when the handshake is gone, but not for the text.
        (V9, [(HEALTHY, "", "10", ASKED, True), (ILL, REQUESTED, "10", "", True)]),
        (V9, [(HEALTHY, "", "10", ASKED, True), (ILL, "", "10", ASKED, False)]),
        # It takes a dropped node back after a minute.
        (V9, [(HEALTHY, "", "10", ASKED, True), (ILL, stamped("Deleted", 59), "10", "", True)]),
        (V9, [(HEALTHY, "", "10", ASKED, True), (ILL, stamped("Deleted", 60), "10", ASKED, False)]),
        # 2.10 reads a changed text.
        (V10, [(HEALTHY, "", "10", ASKED, True), (ILL, REQUESTED, "10", "", False)]),
        # A node without slices is dropped and marked as the version does.
        (V8, [(HEALTHY, ASKED, "10", "", True), (HEALTHY, ASKED, "0", DROPPED, None)]),
        (V9, [(HEALTHY, ASKED, "10", "", True), (HEALTHY, ASKED, "0", DROPPED, None)]),
        (V10, [(HEALTHY, ASKED, "10", "", True), (HEALTHY, ASKED, "0", None, None)]),
        (V10, [(HEALTHY, REQUESTED, "0", "", None)]),
        # A text that is not read leaves what was on offer.
        (V10, [(HEALTHY, "", "10", ASKED, True), ("no", "", "9", ASKED, True)]),
        (V9, [(HEALTHY, "", "10", ASKED, True), ("no", "", "9", "", True)]),
        (V8, [(HEALTHY, "", "10", "", True), ("no", "", "9", "", True)]),
        (V7, [(GOOD, "Reported x", "10", ASKED, True), ("no", "Reported y", "9", "", True)]),
    ],
)
def test_each_version_has_its_reasons_to_read_a_node_and_to_drop_it(
    version: Version, steps: list[tuple[str, str, str, str | None, bool | None]]
) -> None:
    """Steps: register, handshake, slices; the handshake that is written ("": none), what is on
    offer (None: nothing)."""
    registry = Registry(version)
    for register, handshake, slices, written, on_offer in steps:
        writes = registry.ingest(a_node(register, handshake, slices), START)

        assert ({} if written == "" else {HANDSHAKE: written}) == writes
        assert on_offer is offered(registry)
