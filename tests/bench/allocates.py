"""Allocates of pods one after the other, at rest and beside a storm and a scrape."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

from agent.sandbox.hardware_talk import HardwareRequest, ask
from agent.sandbox.lab.cluster import NAMESPACE, SandboxCluster, fetch, scrape
from agent.sandbox.scenario.facts import is_locked, is_running, pod_facts
from agent.sandbox.scenario.stage import plain
from tests.bench.figures import Figure, percentile

RPC = "hami_agent_rpc_duration_seconds"
STORM_PAUSE = 0.02
SCRAPE_PAUSE = 0.25
APPLICATION = 31
"""An XID of an application, which every GPU reports again and again and which takes no GPU away."""


async def spent(cluster: SandboxCluster, pods: int) -> float:
    """Milliseconds of all Allocates together, once the page counts that many: it may be old."""
    while True:
        rpcs = {
            name: value
            for name, labels, value in await scrape(cluster.web_address or "")
            if name.startswith(RPC) and labels["method"] == "allocate" and "le" not in labels
        }
        count = rpcs.get(f"{RPC}_count", 0)
        if count == pods:
            return rpcs.get(f"{RPC}_sum", 0.0) * 1000
        if count > pods:
            raise RuntimeError(f"the agent counts {count:g} Allocates after {pods} pods")
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def a_pod(cluster: SandboxCluster, name: str) -> AsyncIterator[None]:
    """A pod comes, runs, is settled, and goes when the block is left.

    Its name counts as generated, as controllers make them; for another the API server is asked.
    """
    pod = plain(name).pod()
    pod["metadata"]["generateName"] = "pod-"
    cluster.submit(pod)
    await _come(cluster, name)
    yield
    cluster.store.delete("pods", NAMESPACE, name, grace=0)


async def _come(cluster: SandboxCluster, name: str) -> None:
    for holds in (
        lambda: is_running(cluster, name),
        lambda: pod_facts(cluster, name).is_settled and not is_locked(cluster),
    ):
        if not await cluster.until(holds, 30.0):
            raise RuntimeError("\n".join([f"{name} did not come:", *cluster.log.last(20)]))


async def series(cluster: SandboxCluster, kind: str, count: int) -> list[float]:
    """What each of `count` more Allocates took; the first, which finds its way, is left out."""
    done = len(cluster.kubelet.history.of("allocated"))
    found = [await spent(cluster, done)]
    for number in range(1, count + 2):
        async with a_pod(cluster, f"{kind}-{number}"):
            found.append(await spent(cluster, done + number))
    return [now - before for before, now in pairwise(found[1:])]


def whole(id: str, what: str, took: Sequence[float]) -> list[Figure]:  # noqa: A002 -- as in Figure
    """p50 and p99."""
    how = "the agent's own clock, pod by pod"
    return [
        Figure(f"{id}_p50", f"{what}, p50", "ms", took, how),
        Figure(f"{id}_p99", f"{what}, p99", "ms", took, how, value=percentile(took, 99)),
    ]


@contextlib.asynccontextmanager
async def storm(cluster: SandboxCluster) -> AsyncIterator[None]:
    """Each GPU reports an XID every 20 ms, and /metrics is read every 0.25 s."""

    async def strike() -> None:
        while True:
            for gpu in range(8):
                request = HardwareRequest("xid", str(gpu), APPLICATION)
                await ask(cluster.places.hardware_socket, request)
                await asyncio.sleep(STORM_PAUSE / 8)

    async def read() -> None:
        while True:
            await fetch(cluster.web_address or "", "/metrics")
            await asyncio.sleep(SCRAPE_PAUSE)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(strike()), group.create_task(read())]
        yield
        for task in tasks:
            task.cancel()


async def under_load(cluster: SandboxCluster, count: int) -> list[Figure]:
    """Allocates at rest, and beside a storm."""
    quiet = await series(cluster, "quiet", count)
    async with storm(cluster):
        stormy = await series(cluster, "storm", count)
    return [
        *whole("allocate_quiet", "Allocate, at rest", quiet),
        *whole("allocate_storm", "Allocate beside XIDs and a scrape", stormy),
    ]
