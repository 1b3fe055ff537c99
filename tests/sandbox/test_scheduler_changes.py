"""What the scheduler makes of things that come and go while pods wait."""

import asyncio
from collections.abc import Callable

import pytest

from agent.sandbox.api_errors import Json
from agent.sandbox.patching import merge_patch
from agent.sandbox.store import ObjectStore
from tests.fakes.scheduler_cluster import FakeCluster, scheduling


def close(cluster: FakeCluster, *, closed: bool) -> None:
    patch = {"spec": {"unschedulable": closed}}
    cluster.store.update("nodes", "", "n1", lambda node: merge_patch(node, patch))


async def test_a_closed_node_gets_no_pods_until_it_is_opened() -> None:
    cluster = FakeCluster("GPU-a")
    close(cluster, closed=True)
    async with scheduling(cluster):
        cluster.submit("p1")
        await cluster.until(lambda: cluster.condition("p1") != "")
        assert "no nodes available to schedule pods" == cluster.condition("p1")

        close(cluster, closed=False)
        await cluster.until(lambda: cluster.is_bound("p1"))

        assert cluster.is_bound("p1")


async def test_a_deleted_node_is_forgotten() -> None:
    async with scheduling(FakeCluster("GPU-a")) as cluster:
        await asyncio.sleep(1)
        cluster.store.delete("nodes", "", "n1")
        cluster.submit("p1")
        await cluster.until(lambda: cluster.condition("p1") != "")

        assert "no nodes available to schedule pods" == cluster.condition("p1")


async def test_a_pod_that_is_deleted_while_it_waits_is_dropped() -> None:
    async with scheduling(FakeCluster("GPU-a")) as cluster:
        cluster.submit("p1")
        cluster.submit("p2")
        cluster.store.delete("pods", "default", "p2")
        await cluster.until(lambda: cluster.is_bound("p1"))
        await asyncio.sleep(60)

        assert [] == cluster.reasons("p2")
        assert ["p1"] == [pod["metadata"]["name"] for pod in cluster.store.select("pods")]


async def test_a_pod_without_a_gpu_is_bound_without_marks() -> None:
    async with scheduling(FakeCluster("GPU-a")) as cluster:
        spec = {"schedulerName": "hami-scheduler", "containers": [{"name": "c"}]}
        cluster.store.create("pods", {"metadata": {"name": "plain"}, "spec": spec})
        await cluster.until(lambda: cluster.is_bound("plain"))

        assert "annotations" not in cluster.pod("plain")["metadata"]
        assert [] == cluster.reasons("plain")


async def test_weights_that_cannot_be_read_keep_a_pod_pending_with_that_reason() -> None:
    async with scheduling(FakeCluster("GPU-a")) as cluster:
        marks = {"hami.io/device-scoring-weights": "slot=1"}
        cluster.submit("p1", annotations=marks)
        await cluster.until(lambda: cluster.condition("p1") != "")

        assert cluster.condition("p1").startswith("calcScore failed invalid")


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


async def test_a_scheduler_that_fell_behind_the_history_lists_again() -> None:
    cluster = FakeCluster("GPU-a", history=3)
    async with scheduling(cluster):
        await asyncio.sleep(1)
        for number in range(8):
            cluster.submit(f"p{number}")

        await cluster.until(lambda: cluster.is_bound("p0"))

        assert cluster.is_bound("p0")


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
