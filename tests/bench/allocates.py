"""Allocates by step: pods one after the other, alone, beside a storm and a scrape, and at once."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise

import msgspec
from grpclib import GRPCError

from agent.sandbox import hardware_talk as talk
from agent.sandbox.hardware_talk import ask
from agent.sandbox.lab.cluster import NAMESPACE, SandboxCluster, fetch, scrape
from agent.sandbox.scenario.facts import is_locked, is_running, pod_facts
from agent.sandbox.scenario.stage import plain
from agent.wire.v1beta1 import AllocateRequest, ContainerAllocateRequest, DevicePluginStub
from agent.witness import UnixChannel
from tests.bench.figures import Figure, percentile

STEPS = {
    "kubelet": "the question to the kubelet",
    "api-server": "the question to the API server, for a name that was not generated",
    "hook-path": "the look at the hook path",
    "directory": "the container's directory",
    "disk": "the state on disk",
}
RPC = "hami_agent_rpc_duration_seconds"
WAIT = "hami_agent_allocate_wait_seconds_sum"
STORM_PAUSE = 0.02
SCRAPE_PAUSE = 0.25
APPLICATION = 31
"""An XID of an application, which every GPU reports again and again and which takes no GPU away."""


class Spent(msgspec.Struct, frozen=True):
    """Milliseconds of Allocates: all of them, and what they waited for by step."""

    total: float = 0.0
    waits: dict[str, float] = {}

    def since(self, before: "Spent") -> "Spent":
        waits = {step: now - before.waits.get(step, 0.0) for step, now in self.waits.items()}
        return Spent(self.total - before.total, waits)


async def spent(cluster: SandboxCluster, pods: int) -> Spent:
    """Of all Allocates together, once the page counts that many: it may be 0.25 s old."""
    while True:
        page = [*await scrape(cluster.web_address or "")]
        rpcs = {
            name: value
            for name, labels, value in page
            if name.startswith(RPC) and labels["method"] == "allocate" and "le" not in labels
        }
        count = rpcs.get(f"{RPC}_count", 0)
        if count == pods:
            waits = {labels["step"]: value * 1000 for name, labels, value in page if name == WAIT}
            return Spent(rpcs.get(f"{RPC}_sum", 0.0) * 1000, waits)
        if count > pods:
            raise RuntimeError(f"the agent counts {count:g} Allocates after {pods} pods")
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def a_pod(
    cluster: SandboxCluster, name: str, *, is_generated: bool = True
) -> AsyncIterator[None]:
    """A pod comes, runs, is settled, and goes when the block is left.

    Controllers generate the names of their pods; for another name the API server is asked.
    """
    pod = plain(name).pod()
    if is_generated:
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


async def series(
    cluster: SandboxCluster, kind: str, count: int, *, is_generated: bool = True
) -> list[Spent]:
    """What each of `count` more Allocates took; the first, which finds its way, is left out."""
    done = len(cluster.kubelet.history.of("allocated"))
    found = [await spent(cluster, done)]
    for number in range(1, count + 2):
        async with a_pod(cluster, f"{kind}-{number}", is_generated=is_generated):
            found.append(await spent(cluster, done + number))
    return [now.since(before) for before, now in pairwise(found[1:])]


def by_step(took: Sequence[Spent]) -> Iterator[Figure]:
    """A row for each wait, and one for the rest."""
    how = "the agent's own clock, by the sum of allocate_wait_seconds after each pod"
    for step, what in STEPS.items():
        samples = [one.waits[step] for one in took if one.waits.get(step)]
        if samples:
            yield Figure(f"allocate_step_{step}", f"… {what}", "ms", samples, how)
    own = [one.total - sum(one.waits.values()) for one in took]
    what = "… the agent's own: decode, match, encode"
    yield Figure("allocate_step_own", what, "ms", own, "the Allocate without its waits")


def whole(id: str, what: str, took: Sequence[Spent]) -> list[Figure]:  # noqa: A002 -- as in Figure
    """p50 and p99 of the whole."""
    totals, how = [one.total for one in took], "the agent's own clock, pod by pod"
    return [
        Figure(f"{id}_p50", f"{what}, p50", "ms", totals, how),
        Figure(f"{id}_p99", f"{what}, p99", "ms", totals, how, value=percentile(totals, 99)),
    ]


@contextlib.asynccontextmanager
async def storm(cluster: SandboxCluster) -> AsyncIterator[None]:
    """Each GPU reports an XID every 20 ms, and /metrics is read every 0.25 s."""

    async def strike() -> None:
        while True:
            for gpu in range(8):
                request = talk.XidRequest(gpu=str(gpu), xid=APPLICATION)
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


async def at_once(cluster: SandboxCluster, calls: int, runs: int) -> Figure:
    """So many calls behind which there is no pod, until the last one is refused."""
    (socket,) = (
        path for path in cluster.places.plugins.glob("*.sock") if path.name != "kubelet.sock"
    )
    request = AllocateRequest(container_requests=[ContainerAllocateRequest(["none"])])
    took: list[float] = []
    async with UnixChannel(path=str(socket)) as channel:
        plugin = DevicePluginStub(channel)

        async def call() -> None:
            with contextlib.suppress(GRPCError):
                await plugin.allocate(request)
                raise RuntimeError("a call without a pod was granted")

        for _ in range(runs):
            begun = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for _ in range(calls):
                    group.create_task(call())
            took.append((time.perf_counter() - begun) * 1000)
            await asyncio.sleep(1.0)
    how = f"{calls} calls on one connection, {runs} times; at most 0.8 s are promised"
    return Figure(
        f"allocate_{calls}_at_once",
        f"{calls} calls at once, no pod → last refusal",
        "ms",
        took,
        how,
        800,
    )


async def under_load(cluster: SandboxCluster, count: int) -> list[Figure]:
    """Allocates of pods with names of their own, beside a storm, and many at once."""
    named = await series(cluster, "named", count, is_generated=False)
    quiet = await series(cluster, "quiet", count)
    async with storm(cluster):
        stormy = await series(cluster, "storm", count)
    asked = [one.waits.get("api-server", 0.0) for one in named]
    many = [await at_once(cluster, calls, 5) for calls in (8, 64)]
    async with a_pod(cluster, "after"):
        pass
    return [
        *whole("allocate_named", "Allocate, own name", named),
        Figure("allocate_named_get", f"… {STEPS['api-server']}", "ms", asked, "as above"),
        *whole("allocate_quiet", "Allocate, at rest", quiet),
        *whole("allocate_storm", "Allocate beside XIDs and a scrape", stormy),
        *many,
    ]
