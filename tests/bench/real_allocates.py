"""Allocate as the real kubelet meets it, and where its time goes."""

import asyncio
from collections.abc import Mapping
from statistics import median

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.bench import toll
from tests.bench.beside import RealBed, kubelet_port, open_bed
from tests.bench.figures import Figure
from tests.bench.lab import PATIENCE, beside
from tests.peers.lab.agents import Agent
from tests.peers.lab.faces import page
from tests.peers.lab.identities import ADMIN
from tests.peers.lab.node_state import until_unlocked
from tests.peers.lab.placement import place, share
from tests.peers.lab.pods import delete, until_deleted, until_running
from tests.peers.lab.workloads import NAMESPACE, a_pod, as_if_generated

PODS = 40
KUBELET = "kubelet_device_plugin_alloc_duration_seconds"
INSIDE = "hami_agent_rpc_duration_seconds"
STEP = "step"
"""The label by which a histogram of the agent tells the steps of an Allocate apart."""
HAMI = "1,319 ms, 21.9 ms with 5 s between pods; -"

Sums = Mapping[str, float]
"""Seconds of all calls together, by what they were spent on."""


async def allocates(_: int) -> list[Figure]:
    """Pods one by one, placed by hand, and after each what it could not do without, by itself."""
    at_kubelet, inside = list[float](), list[float]()
    steps: dict[str, list[float]] = {}
    tolls: list[toll.Toll] = []
    async with open_bed() as bed:
        cluster = bed.cluster
        agent = (await bed.start()).agent
        await bed.until_up(agent)
        state = cluster.space.view / "var/lib/hami-agent/state.json"
        directory = state.parent / "toll"
        directory.mkdir()
        arguments = str(directory), str(cluster.kubelet.pod_resources)
        async with beside("tests.bench.toll", *arguments) as (told, said):
            for number in range(PODS + 1):
                name = f"one-{number}"
                before = await _kubelet_sum(bed), await _sums(agent)
                await place(cluster, as_if_generated(a_pod(name)), [[share(cluster, number % 8)]])
                await until_running(cluster, name)
                await until_unlocked(cluster)
                now = await _kubelet_sum(bed), await _sums(agent)
                told.write(f"{state.stat().st_size} {NAMESPACE} {name}\n".encode())
                async with asyncio.timeout(PATIENCE):
                    disk, question = map(float, (await said.readline()).split())
                await delete(cluster, name, grace=0)
                await until_deleted(cluster, name)
                if number:  # the first has to find its way
                    at_kubelet.append((now[0] - before[0]) * 1000)
                    for what, total in now[1].items():
                        spent = (total - before[1].get(what, 0.0)) * 1000
                        (inside if what == INSIDE else steps.setdefault(what, [])).append(spent)
                    tolls.append((disk, question))
    return _figures(at_kubelet, inside, steps, tolls)


def _figures(
    at_kubelet: list[float],
    inside: list[float],
    steps: Mapping[str, list[float]],
    tolls: list[toll.Toll],
) -> list[Figure]:
    how = f"{KUBELET} of each of {PODS} pods, one after the other"
    both = [sum(one) for one in tolls]
    over = [took / floor for took, floor in zip(inside, both, strict=True)]
    own, alone = f"{INSIDE} of each pod", "in a process of its own, after each pod"
    paired = "pod by pod: the Allocate and what the two took by themselves just after"
    what = "Allocate in the agent"
    return [
        Figure("real_allocate", "Allocate at the kubelet", "ms", at_kubelet, how, peers=HAMI),
        Figure("real_allocate_inside", what, "ms", inside, own),
        *(
            Figure(
                f"real_allocate_step_{name}",
                f"… of it waiting: {name}",
                "ms",
                took,
                "by its metrics",
            )
            for name, took in sorted(steps.items())
        ),
        Figure(
            "real_allocate_alone_disk",
            "the same on disk, alone",
            "ms",
            [d for d, _ in tolls],
            alone,
        ),
        Figure(
            "real_allocate_alone_question", "the same question", "ms", [q for _, q in tolls], alone
        ),
        Figure("real_allocate_over_both", f"{what} over both", "x", over, paired, 1.2),
        Figure(
            "real_allocate_p50_over_both",
            "… by the medians of the three",
            "x",
            [median(inside) / sum(map(median, zip(*tolls, strict=True)))],
            "of the rows above",
            1.2,
        ),
    ]


async def _kubelet_sum(bed: RealBed) -> float:
    """Seconds that all Allocates took at the kubelet, by its own metrics."""
    cluster = bed.cluster
    url = f"https://127.0.0.1:{kubelet_port(cluster)}/metrics"
    headers = {"Authorization": f"Bearer {cluster.plane.identities.tokens[ADMIN]}"}
    async with (
        aiohttp.ClientSession(headers=headers, raise_for_status=True) as session,
        session.get(url, ssl=False) as answer,  # it signs its own certificate
    ):
        text = await answer.text()
    return sum(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{KUBELET}_sum")
    )


async def _sums(agent: Agent) -> Sums:
    """Seconds of all Allocates that were answered, whole and by step.

    The page may be a quarter of a second old.
    """
    await asyncio.sleep(0.3)
    _, text = await page(agent, "/metrics")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{INSIDE}_sum" and sample.labels["method"] == "allocate":
                found[INSIDE] = found.get(INSIDE, 0.0) + sample.value
            elif sample.name.endswith("_seconds_sum") and STEP in sample.labels:
                found[sample.labels[STEP]] = sample.value
    return found
