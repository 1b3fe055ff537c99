"""The scheduler as a whole: what becomes of pods in a store."""

import asyncio

from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.webhook import admit_pod
from tests.fakes.scheduler_cluster import LOCK, FakeCluster, register_of, scheduling


async def test_a_pod_is_placed_locked_and_bound() -> None:
    async with scheduling(FakeCluster("GPU-a", "GPU-b")) as cluster:
        cluster.submit("p1")
        await cluster.until(lambda: cluster.is_bound("p1"))

        metadata = cluster.pod("p1")["metadata"]
        assert "GPU-b,NVIDIA,1000,0:;" == metadata["annotations"]["hami.io/vgpu-devices-allocated"]
        assert (
            "GPU-b,NVIDIA,1000,0:;" == metadata["annotations"]["hami.io/vgpu-devices-to-allocate"]
        )
        assert "allocating" == metadata["annotations"]["hami.io/bind-phase"]
        assert "n1" == metadata["labels"]["hami.io/vgpu-node"]
        assert cluster.node()[LOCK].endswith(",default,p1")
        await asyncio.sleep(1)  # Events come behind
        assert {"FilteringSucceed", "BindingSucceed"} == set(cluster.reasons("p1"))


async def test_a_second_pod_waits_for_the_lock_and_is_bound_after_its_release() -> None:
    async with scheduling(FakeCluster("GPU-a")) as cluster:
        cluster.submit("p1")
        cluster.submit("p2")
        await cluster.until(lambda: "BindingFailed" in cluster.reasons("p2"))
        assert not cluster.is_bound("p2")

        cluster.unlock()
        await cluster.until(lambda: cluster.is_bound("p2"))

        assert cluster.node()[LOCK].endswith(",default,p2")


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


async def test_kube_scheduler_gives_up_after_30_seconds_and_hami_binds_all_the_same() -> None:
    settings = SchedulerSettings(kube_qps=0.1, kube_burst=1)
    async with scheduling(FakeCluster("GPU-a", settings=settings)) as cluster:
        cluster.submit("p1")
        await cluster.until(lambda: cluster.condition("p1") != "", within=300)
        assert "context deadline exceeded" in cluster.condition("p1")

        await cluster.until(lambda: cluster.is_bound("p1"), within=300)

        assert cluster.is_bound("p1")


async def test_the_lock_of_a_deleted_pod_is_taken_over() -> None:
    async with scheduling(FakeCluster("GPU-a")) as cluster:
        cluster.submit("p1")
        await cluster.until(lambda: cluster.is_bound("p1"))
        cluster.store.delete("pods", "default", "p1", grace=0)

        cluster.submit("p2")
        await cluster.until(lambda: cluster.is_bound("p2"))

        assert cluster.node()[LOCK].endswith(",default,p2")


async def test_a_pod_that_cannot_fit_stays_pending_and_says_why() -> None:
    async with scheduling(FakeCluster("GPU-a", "GPU-b")) as cluster:
        cluster.submit("big", memory_mib=20000)
        await cluster.until(lambda: cluster.condition("big") != "")

        expected = "0/1 nodes are available: 1 2/2 CardInsufficientMemory."
        assert expected == cluster.condition("big")
        assert not cluster.is_bound("big")
        assert {"FilteringFailed", "FailedScheduling"} == set(cluster.reasons("big"))


async def test_a_pod_that_cannot_fit_is_not_tried_again_while_nothing_changes() -> None:
    async with scheduling(FakeCluster("GPU-a")) as cluster:
        cluster.submit("big", memory_mib=20000)
        await cluster.until(lambda: cluster.condition("big") != "")
        await asyncio.sleep(14)
        version = cluster.store.version

        await asyncio.sleep(600)

        tries = [event["count"] for event in cluster.store.select("events")]
        assert [1, 1, 1] == tries
        assert version + 10 > cluster.store.version


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


async def test_an_eager_scheduler_sees_a_changed_annotation_at_once() -> None:
    async with scheduling(FakeCluster("GPU-a", eager=True)) as cluster:
        await asyncio.sleep(1)
        cluster.annotate_node(register=register_of("GPU-a", healthy=False))
        await asyncio.sleep(0.1)
        cluster.submit("p1")
        await cluster.until(lambda: cluster.condition("p1") != "")

        assert "0/1 nodes are available: 1 1/1 CardNotHealth." == cluster.condition("p1")


async def test_a_pod_whose_request_hami_drops_is_bound_without_an_allocation() -> None:
    async with scheduling(FakeCluster("GPU-a")) as cluster:
        limits = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": "3Gi"}
        container = {"name": "c0", "resources": {"limits": limits}}
        pod: Json = {"metadata": {"name": "odd"}, "spec": {"containers": [container]}}
        cluster.store.create("pods", admit_pod(pod, cluster.scheduler.settings))
        await cluster.until(lambda: cluster.is_bound("odd"))

        marks = cluster.pod("odd")["metadata"]["annotations"]
        assert {"hami.io/bind-phase", "hami.io/bind-time"} == marks.keys()
        assert LOCK not in cluster.node()


async def test_pods_of_other_schedulers_are_left_alone() -> None:
    async with scheduling(FakeCluster("GPU-a")) as cluster:
        spec = {"schedulerName": "volcano", "containers": [{"name": "c"}]}
        cluster.store.create("pods", {"metadata": {"name": "x"}, "spec": spec})
        version = cluster.store.version
        await asyncio.sleep(1)

        assert "nodeName" not in cluster.pod("x")["spec"]
        assert [] == cluster.reasons("x")
        assert version + 1 >= cluster.store.version
