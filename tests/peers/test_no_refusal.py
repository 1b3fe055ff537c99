"""No good pod is refused: what teams run, one pod after another and many at once, on one node.

The scheduler is our model of HAMi's, or HAMi's own; either with the client of its default flags.
"""

import asyncio
import statistics

import pytest

from tests.peers.lab.controllers import (
    JOBS,
    SETS,
    a_job,
    a_set,
    failed,
    restart,
    told_count,
    until_complete,
    until_rolled_out,
    until_told_count,
    wrong_inside,
)
from tests.peers.lab.grants import expected_inside, seen_inside
from tests.peers.lab.node_state import until_unlocked
from tests.peers.lab.pairs import decided
from tests.peers.lab.pods import (
    PODS,
    name_of,
    phase_of,
    telling,
    until_settled,
    until_told,
    up_at,
)
from tests.peers.lab.tidy import remove
from tests.peers.lab.workloads import a_container, a_pod

pytestmark = pytest.mark.timeout(420)


def check_refusals(cluster, agent) -> None:
    assert [] == agent.events("alloc.refused")
    assert [] == failed(cluster)


async def run_one(cluster, pod) -> float:
    """Run a pod; when it was created."""
    await cluster.reading.until_current()
    begun = asyncio.get_running_loop().time()
    seen = await decided(cluster, await cluster.api.create(PODS, pod))
    assert phase_of(seen) != "Failed", seen["status"]
    return begun


async def check_inside(cluster, pods) -> None:
    names = [*map(name_of, pods)]
    await until_told(cluster, *names)
    wanted = {name: expected_inside(cluster, name) for name in names}
    assert wanted == {name: await seen_inside(cluster, name) for name in names}


async def test_30_pods_one_after_the_other(cluster, agent, table):
    pods = [
        telling(cluster, a_pod(f"row-{number}", a_container(memory=2000 + number, cores=0)))
        for number in range(30)
    ]
    times = []
    for pod in pods:
        begun = await run_one(cluster, pod)
        times.append(up_at(cluster, name_of(pod), begun) - begun)

    await until_settled(cluster, *map(name_of, pods))
    await check_inside(cluster, pods)
    check_refusals(cluster, agent)
    table.add("30 pods one after the other: create → Ready, median", statistics.median(times))


async def test_a_stateful_set_of_3_restarted_five_times(cluster, agent, table):
    began = asyncio.get_running_loop().time()
    told = told_count(cluster)
    await cluster.reading.until_current()
    try:
        await cluster.api.create(SETS, a_set(cluster, "web", 3))
        await until_rolled_out(cluster, "web", 120.0)
        for revision in range(1, 6):
            await until_told_count(cluster, told + 3 * revision)  # or it goes before it has told
            await restart(cluster, "web", revision)
            await until_rolled_out(cluster, "web", 120.0)

        await until_unlocked(cluster)
        await until_told_count(cluster, told + 18)
        check_refusals(cluster, agent)
        assert [] == wrong_inside(cluster, "web")
        assert 18 == told_count(cluster) - told
        took = asyncio.get_running_loop().time() - began
        table.add("a StatefulSet of 3, restarted five times: all done", took)
    finally:
        await remove(cluster, f"{SETS}/web")


async def test_a_job_of_20_short_pods_with_parallelism_4(cluster, agent, table):
    began = asyncio.get_running_loop().time()
    told = told_count(cluster)
    await cluster.reading.until_current()
    try:
        await cluster.api.create(JOBS, a_job(cluster, "batch", 20, 4))
        await until_complete(cluster, "batch", 300.0)

        await until_unlocked(cluster)
        check_refusals(cluster, agent)
        assert [] == wrong_inside(cluster, "batch")
        assert 20 == told_count(cluster) - told
        took = asyncio.get_running_loop().time() - began
        table.add("a Job of 20 short pods, 4 at a time: all done", took)
    finally:
        await remove(cluster, f"{JOBS}/batch")


async def test_pods_with_an_init_container_without_gpus_are_served_as_the_scheduler_places_them(
    cluster, agent
):
    """HAMi 2.10 counts such pods as nothing once the init container is done."""
    pods = []
    for number in range(10):
        init = a_container("prepare", gpus=0, script="true")
        main = a_container(memory=40000, cores=0)
        pod = telling(cluster, a_pod(f"prepared-{number}", main, inits=(init,)))
        pods.append(pod)
        await run_one(cluster, pod)

    await check_inside(cluster, pods)
    check_refusals(cluster, agent)
