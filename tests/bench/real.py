"""What is measured beside the real peers: starts, rest, memory, Allocate."""

import asyncio

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.bench import process
from tests.bench.beside import RealBed, kubelet_port, open_bed
from tests.bench.figures import Figure
from tests.bench.lab import PATIENCE, beside
from tests.peers.lab.agents import Agent
from tests.peers.lab.control import ADMIN
from tests.peers.lab.pods import NAMESPACE, a_pod, as_if_generated

STARTS = 2
"""Starts for each run."""
SETTLED = 10.0
"""Seconds after which nothing of the start is under way any more."""
WINDOW = 10.0
WINDOWS = 12
LONG = 600.0


async def starts(runs: int) -> list[Figure]:
    """exec → Register, warm: the first start, which fills the page cache, is left out."""
    times = list[float]()
    async with open_bed() as bed:
        for _ in range(runs * STARTS + 1):
            agent, seconds = await bed.start()
            await bed.end(agent)
            times.append(seconds * 1000)
    how = "exec → the kubelet's log line of the Register call"
    return [Figure("real_start", "exec → Register", "ms", times[1:], how, 500)]


async def rest(_: int) -> list[Figure]:
    """What the process does while nothing happens, and what it weighs after ten minutes."""
    percents, wakes = list[float](), list[float]()
    loop = asyncio.get_running_loop()
    async with open_bed() as bed:
        # The kubelet has nothing to tell, either.
        await bed.calm()
        agent, _took = await bed.start()
        await bed.until_up(agent)
        await asyncio.sleep(SETTLED)
        pid = agent.part.pid
        for _window in range(WINDOWS):
            begun = loop.time(), process.cpu_seconds(pid), process.wake_ups(pid)
            await asyncio.sleep(WINDOW)
            took = loop.time() - begun[0]
            percents.append((process.cpu_seconds(pid) - begun[1]) / took * 100)
            wakes.append((process.wake_ups(pid) - begun[2]) / took)
        await asyncio.sleep(LONG - WINDOWS * WINDOW)
        weight = process.weight(pid)
    how = f"{WINDOWS} windows of {WINDOW:g} s, 8 GPUs, no pod, no scrape"
    switches = f"context switches of all threads; {how}"
    return [
        Figure("real_rest_cpu", "CPU at rest, of a core", "%", percents, how, 0.15),
        Figure("real_rest_wakes", "wake-ups at rest", "/s", wakes, switches, 10),
        *weight.figures(f"{LONG / 60:g} min after the start"),
    ]


# Allocate as the real kubelet meets it, and where its time goes.

PODS = 40
KUBELET = "kubelet_device_plugin_alloc_duration_seconds"
INSIDE = "hami_agent_rpc_duration_seconds"


async def allocates(_: int) -> list[Figure]:
    """Pods one by one, placed by hand, and after each what it could not do without, by itself."""
    at_kubelet, inside, tolls = list[float](), list[float](), list[tuple[float, float]]()
    async with open_bed() as bed:
        cluster = bed.cluster
        agent, _took = await bed.start()
        await bed.until_up(agent)
        state = cluster.space.view / "var/lib/hami-agent/state.json"
        directory = state.parent / "toll"
        directory.mkdir()
        arguments = str(directory), str(cluster.kubelet.pod_resources)
        async with beside("tests.bench.toll", *arguments) as (told, said):
            for number in range(PODS + 1):
                name = f"one-{number}"
                before = await _kubelet_sum(bed), await _agent_sum(agent)
                await cluster.place(as_if_generated(a_pod(name)), [[cluster.share(number % 8)]])
                await cluster.until_running(name)
                await cluster.until_unlocked()
                now = await _kubelet_sum(bed), await _agent_sum(agent)
                told.write(f"{state.stat().st_size} {NAMESPACE} {name}\n".encode())
                async with asyncio.timeout(PATIENCE):
                    disk, question = map(float, (await said.readline()).split())
                await cluster.delete(name, grace=0)
                await cluster.until_deleted(name)
                if number:  # the first has to find its way
                    at_kubelet.append((now[0] - before[0]) * 1000)
                    inside.append((now[1] - before[1]) * 1000)
                    tolls.append((disk, question))
    how = f"{KUBELET} of each of {PODS} pods, one after the other"
    over = [took / sum(floor) for took, floor in zip(inside, tolls, strict=True)]
    paired = f"{INSIDE} of each pod and what disk and question took by themselves just after"
    what = "Allocate at the kubelet"
    return [
        Figure("real_allocate_p50", f"{what}, p50", "ms", at_kubelet, how),
        Figure("real_allocate_p99", f"{what}, p99", "ms", at_kubelet, how, None, 99),
        Figure("real_allocate_over", "Allocate in the agent over both", "x", over, paired, 1.3),
    ]


async def _kubelet_sum(bed: RealBed) -> float:
    """Seconds that all Allocates took at the kubelet, by its own metrics."""
    cluster = bed.cluster
    url = f"https://127.0.0.1:{kubelet_port(cluster)}/metrics"
    headers = {"Authorization": f"Bearer {cluster.plane.tokens[ADMIN]}"}
    async with (
        aiohttp.ClientSession(headers=headers, raise_for_status=True) as session,
        session.get(url, ssl=False) as answer,  # it signs its own certificate
    ):
        text = await answer.text()
    return sum(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{KUBELET}_sum")
    )


async def _agent_sum(agent: Agent) -> float:
    """Seconds of all Allocates that were answered. The page may be a quarter of a second old."""
    await asyncio.sleep(0.3)
    _, text = await agent.page("/metrics")
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"{INSIDE}_sum" and sample.labels["method"] == "allocate"
    )
