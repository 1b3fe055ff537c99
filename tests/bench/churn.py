"""What the agent weighs after as many pods as an hour may bring, one after the other."""

import asyncio

from agent.sandbox.lab.cluster import SandboxCluster
from tests.bench.allocates import a_pod
from tests.bench.figures import Figure
from tests.bench.lab import CALM, with_library
from tests.bench.process import MEGA, Weight, weight

FEW = 100
"""Pods after which everything that an Allocate needs is loaded, and caches are full."""
MANY = 3600
"""As many as one a second are in an hour. They come faster here, so more of those that are gone are
still kept: for 10 minutes, 1,024 at most."""


async def churn(_: int) -> list[Figure]:
    """Memory after FEW pods, and after MANY more."""
    async with with_library() as cluster:
        few = await _after(cluster, range(FEW))
        many = await _after(cluster, range(FEW, FEW + MANY))

    def figure(kind: str, told: str, after: int, megabytes: float, budget: float) -> Figure:
        how = f"smaps_rollup, {CALM:g} s after pod {after}; API model without TLS"
        name = f"churn_{kind}_{after}"
        return Figure(name, f"{told} after {after:,} pods", "MB", [megabytes], how, budget)

    return [
        figure(kind, told, after, getattr(found, kind) / MEGA, budget)
        for after, found in ((FEW, few), (FEW + MANY, many))
        for kind, told, budget in (("resident", "resident", 52), ("anonymous", "… anonymous", 38))
    ]


async def _after(cluster: SandboxCluster, numbers: range) -> Weight:
    for number in numbers:
        async with a_pod(cluster, f"pod-{number}"):
            pass
    await asyncio.sleep(CALM)
    return weight(cluster.agent.pid)
