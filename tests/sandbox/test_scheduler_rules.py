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
    Load,
    RegisteredNode,
    SchedulerSettings,
    Steering,
    parse_quantity,
    read_steering,
)
from agent.sandbox.scheduler.registry import Registry, Version, decode, read_offer
from agent.sandbox.scheduler.usage import Quotas, Reservation, Usage
from agent.sandbox.scheduler.webhook import review_pod
from agent.sandbox.store import Json, ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import START
from tests.fakes.scheduler_cluster import REGISTER, FakeCluster, register_of, scheduling
from tests.fakes.scheduler_vectors import build_pod

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", 5),
        ("1k", 1000),
        ("2Ki", 2048),
        ("500m", None),
        ("2000m", 2),
        ("1.5", None),
        ("-3", -3),
        ("", None),
        ("much", None),
    ],
)
def test_a_quantity_is_a_whole_number_or_nothing(text: object, expected: int | None) -> None:
    assert expected == parse_quantity(text)


def test_a_pod_counts_by_the_greater_of_its_init_peak_and_its_sum() -> None:
    groups = [
        [Share(A, 8000, 50)],
        [Share(A, 3000, 60), Share(B, 100, 1)],
        [Share(A, 1000, 10)],
        [Share(A, 2000, 20)],
    ]

    during, after = Reservation("n", groups, 2), Reservation("n", groups, 2, is_past_init=True)

    assert {A: Load(2, 8000, 60), B: Load(1, 100, 1)} == during.loads()
    assert {A: Load(2, 3000, 30)} == after.loads()


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


# The scheduler as a whole: what becomes of pods in a store.


async def test_a_freed_lock_is_used_after_the_back_off_only() -> None:
    async with scheduling(FakeCluster("GPU-a", eager=True)) as cluster:
        cluster.submit("p1")
        cluster.submit("p2")
        await cluster.until(lambda: cluster.condition("p2") != "")
        failed = asyncio.get_running_loop().time()
        assert cluster.condition("p2").endswith(": node lock contention")

        cluster.unlock()
        await cluster.until(lambda: cluster.is_bound("p2"))

        assert asyncio.get_running_loop().time() - failed >= 1.0


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

MEMORY, CORES = "limits.nvidia.com/gpumem", "limits.nvidia.com/gpucores"


def quota(name: str, namespace: str = "default", **hard: object) -> Json:
    keys = {"memory": MEMORY, "cores": CORES}
    limits = {keys.get(key, key): value for key, value in hard.items()}
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"hard": limits}}


def holding(memory_mib: int, cores: int, namespace: str = "default") -> Usage:
    usage = Usage()
    groups = [[Share(A, memory_mib, cores)]]
    usage.reserve("u", Reservation("n1", groups, 0, namespace=namespace))
    return usage


def asked(count: int, memory_mib: int, cores: int = 0) -> Json:
    limits = {"nvidia.com/gpu": count, "nvidia.com/gpumem": memory_mib}
    limits["nvidia.com/gpucores"] = cores
    return {"name": f"c{memory_mib}", "limits": limits}


@pytest.mark.parametrize(
    ("usage", "factor", "asked_for", "fits"),
    [
        (holding(1000, 20), 1, ("default", 500, 30), True),
        (holding(1000, 20), 1, ("default", 501, 0), False),
        (holding(1000, 20), 1, ("default", 0, 31), False),
        (holding(1000, 20, "other"), 1, ("default", 1500, 0), True),
        # The factor multiplies the limit of the memory.
        (holding(0, 0), 4, ("default", 6001, 0), False),
        (holding(0, 0), 4, ("default", 0, 51), False),
    ],
)
def test_what_a_namespace_holds_and_what_is_asked_may_reach_the_limit(
    usage: Usage, factor: int, asked_for: tuple[str, int, int], *, fits: bool
) -> None:
    quotas = Quotas(usage, factor)
    quotas.see("ADDED", quota("q", memory=1500, cores=50))

    assert fits == quotas.fits(*asked_for)


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
    quotas.see("ADDED", quota("q", memory=1000))
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
    ("wish", "admitted"),
    [
        ({"nvidia.com/vgpu-mode": ""}, False),
        ({"nvidia.com/vgpu-mode": "mig,hami-core"}, True),
        ({"nvidia.com/use-gputype": " "}, True),
        ({"nvidia.com/use-gputype": " , "}, False),
        ({"nvidia.com/use-gputype": "t4"}, True),
    ],
)
def test_an_empty_mode_or_a_list_of_commas_alone_admits_no_type(
    wish: dict[str, str], *, admitted: bool
) -> None:
    assert admitted == steering(**wish).admits_type(gpu(UUIDS[0]))


@pytest.mark.parametrize(("text", "admitted"), [("", True), (",", False), (" GPU-a ,x", True)])
def test_a_list_of_commas_alone_admits_no_uuid(text: str, *, admitted: bool) -> None:
    wish = steering(**{"nvidia.com/use-gpuuuid": text})

    assert admitted == wish.admits_uuid(gpu(UUIDS[0]))


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
LATER = (Version.V2_8, Version.V2_9, Version.V2_10)


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


@pytest.mark.parametrize("version", Version)
def test_each_version_reads_its_own_form_and_no_other(version: Version) -> None:
    texts = {HEALTHY, COLON % "true", SEVEN % "true"}
    read = {text for text in texts if decode(text, version) is not None}

    if version.reads_json:
        assert {HEALTHY} == read
    else:
        assert {SEVEN % "true", COLON % "true"} == read


def test_up_to_2_7_1_every_stamp_is_a_reason_to_read() -> None:
    registry = Registry(Version.V2_7)

    writes = registry.ingest(a_node(COLON % "true", "Reported x"), START)
    assert {HANDSHAKE: stamped("Requesting", 0)} == writes
    registry.ingest(a_node(COLON % "false", stamped("Requesting", 0)), START)
    assert offered(registry)
    registry.ingest(a_node(COLON % "false", "Reported y"), START)
    assert offered(registry) is False


def test_up_to_2_7_1_a_minute_of_silence_drops_the_node_until_it_speaks() -> None:
    registry = Registry(Version.V2_7)
    text = COLON % "true"
    registry.ingest(a_node(text, "Reported x"), START)

    assert {} == registry.ingest(a_node(text, stamped("Requesting", 59)), START)
    assert {HANDSHAKE: stamped("Deleted", 0)} == registry.ingest(
        a_node(text, stamped("Requesting", 60)), START
    )
    assert offered(registry) is None
    registry.ingest(a_node(text, stamped("Deleted", 600)), START)
    assert offered(registry) is None
    registry.ingest(a_node(text, "Reported y"), START)
    assert offered(registry)


REQUESTED = stamped("Requesting", 600)


@pytest.mark.parametrize(
    ("version", "node", "writes", "is_read"),
    [
        # 2.8 reads again when the count changed, and for no other reason.
        (Version.V2_8, a_node(ILL, "Reported x"), {}, False),
        (Version.V2_8, a_node(ILL, "Reported x", "9"), {}, True),
        # 2.9 also does when the handshake is gone, but not for the text.
        (Version.V2_9, a_node(ILL, REQUESTED), {}, False),
        (Version.V2_9, a_node(ILL), {HANDSHAKE: stamped("Requesting", 0)}, True),
        # It takes a dropped node back after a minute.
        (Version.V2_9, a_node(ILL, stamped("Deleted", 59)), {}, False),
        (
            Version.V2_9,
            a_node(ILL, stamped("Deleted", 60)),
            {HANDSHAKE: stamped("Requesting", 0)},
            True,
        ),
        # 2.10 reads a changed text.
        (Version.V2_10, a_node(ILL, REQUESTED), {}, True),
    ],
)
def test_each_later_version_has_its_reasons_to_read_again(
    version: Version, node: dict[str, Any], writes: object, *, is_read: bool
) -> None:
    registry = Registry(version)
    registry.ingest(a_node(HEALTHY), START)

    assert writes == registry.ingest(node, START)
    assert (offered(registry) is False) is is_read


@pytest.mark.parametrize("version", LATER)
def test_a_node_without_slices_is_dropped_and_marked_as_the_version_does(version: Version) -> None:
    registry = Registry(version)
    registry.ingest(a_node(HEALTHY, stamped("Requesting", 0)), START)
    assert offered(registry)

    writes = registry.ingest(a_node(HEALTHY, stamped("Requesting", 0), "0"), START)

    mark = None if version is Version.V2_10 else stamped("Deleted", 0)
    assert {HANDSHAKE: mark} == writes
    assert offered(registry) is None


def test_2_10_cleans_up_nothing_where_it_knows_nothing() -> None:
    gone = a_node(HEALTHY, stamped("Requesting", 600), "0")

    assert {} == Registry(Version.V2_10).ingest(gone, START)


@pytest.mark.parametrize("version", Version)
def test_a_text_that_is_not_read_leaves_what_was_on_offer(version: Version) -> None:
    registry = Registry(version)
    registry.ingest(a_node(HEALTHY if version.reads_json else COLON % "true", "Reported x"), START)

    registry.ingest(a_node("no annotation", "Reported y", "9"), START)

    assert offered(registry)
