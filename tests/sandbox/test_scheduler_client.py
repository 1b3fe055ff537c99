"""The queue of the scheduler's client: a burst, then so many a second, in the order of asking."""

import asyncio

import pytest

from agent.sandbox.api_errors import Json
from agent.sandbox.patching import merge_patch
from agent.sandbox.scheduler.cluster import ClientQueue, QueuedCluster, StoreCluster
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.verbs import HamiVerbs
from agent.sandbox.store import ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.scheduler_cluster import LOCK, REGISTER, register_of
from tests.fakes.scheduler_vectors import build_pod

GPU = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}


async def turns(queue: ClientQueue, count: int) -> list[float]:
    """When each of so many requests went that asked at the same time."""
    loop, went = asyncio.get_running_loop(), list[tuple[float, int]]()
    began = loop.time()

    async def ask(number: int) -> None:
        await queue.turn()
        went.append((round(loop.time() - began, 6), number))

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(ask(number))
    assert [number for _, number in went] == list(range(count))
    return [at for at, _ in went]


async def test_a_burst_goes_at_once_and_then_five_a_second() -> None:
    queue = ClientQueue(5, 10)

    assert [0.0] * 10 + [0.2, 0.4, 0.6] == await turns(queue, 13)
    await asyncio.sleep(1)
    assert [0.0] * 5 + [0.2] == await turns(queue, 6)
    await asyncio.sleep(1000)
    assert [0.0] * 10 + [0.2] == await turns(queue, 11)


async def test_a_rate_below_zero_is_no_limit() -> None:
    assert [0.0] * 50 == await turns(ClientQueue(-1, 1), 50)


async def test_a_turn_that_must_be_free_is_refused_where_it_costs_a_wait() -> None:
    queue = ClientQueue(0.5, 1)

    assert [True, False] == [queue.try_turn(), queue.try_turn()]
    await asyncio.sleep(2)
    assert queue.try_turn()


async def test_every_call_of_the_port_waits_for_its_turn() -> None:
    store = ObjectStore(LoopClock(), Seeded())
    store.create("nodes", {"metadata": {"name": "n1"}})
    store.create("pods", build_pod({"containers": []}))
    cluster = QueuedCluster(StoreCluster(store), ClientQueue(1, 1))
    began = asyncio.get_running_loop().time()

    await cluster.get("nodes", "", "n1")
    await cluster.patch("nodes", "", "n1", {"metadata": {"annotations": {"a": "1"}}})
    await cluster.create("events", "default", {"metadata": {"name": "e"}})
    await cluster.bind("default", "p", store.get("pods", "default", "p")["metadata"]["uid"], "n1")

    assert began + 3 == asyncio.get_running_loop().time()


def unlocked(node: Json) -> Json:
    return merge_patch(node, {"metadata": {"annotations": {LOCK: None}}})


async def scheduled(settings: SchedulerSettings, count: int) -> list[float]:
    """Seconds between bind-time and the stamp of the lock, for pods that are bound in a row.

    The lock is released as soon as a pod is bound. Each pod is filtered and bound at once.
    """
    store = ObjectStore(LoopClock(), Seeded())
    node: Json = {"metadata": {"name": "n1", "annotations": {REGISTER: register_of("GPU-a")}}}
    node["status"] = {"allocatable": {"nvidia.com/gpu": "10"}}
    store.create("nodes", node)
    hami = HamiVerbs(StoreCluster(store), LoopClock(), Seeded(), settings, eager=True)
    await hami.see_node("ADDED", store.get("nodes", "", "n1"))
    gaps = []
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(hami.run())
        for number in range(count):
            name = f"p{number}"
            pod = build_pod({"containers": [{"name": "c", "limits": GPU}]}, name)
            pod = store.create("pods", pod)
            hami.see_pod("ADDED", pod)
            await hami.filter(pod, ["n1"])
            await hami.bind("default", name, pod["metadata"]["uid"], "n1")
            stamp = store.get("nodes", "", "n1")["metadata"]["annotations"][LOCK].split(",")[0]
            marks = store.get("pods", "default", name)["metadata"]["annotations"]
            at = LoopClock().now().fromisoformat(stamp).timestamp()
            gaps.append(at - int(marks["hami.io/bind-time"]))
            store.update("nodes", "", "n1", unlocked)
        sending.cancel()
    return gaps


@pytest.mark.parametrize(
    ("settings", "expected"),
    [(SchedulerSettings(), {0, 1}), (SchedulerSettings().quick(), {0})],
)
async def test_bind_time_is_older_than_the_lock_by_the_wait_in_the_queue(
    settings: SchedulerSettings, expected: set[int]
) -> None:
    assert expected == set(await scheduled(settings, 8))
