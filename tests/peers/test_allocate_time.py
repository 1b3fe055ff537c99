"""How long an Allocate takes inside the agent: this node's disk and kubelet included."""

import statistics

import pytest

from tests.peers.lab.faces import readings
from tests.peers.lab.node_state import until_unlocked
from tests.peers.lab.placement import place, share
from tests.peers.lab.pods import delete, until_deleted, until_running
from tests.peers.lab.workloads import a_pod

TRIES = 40
MILLI = 1000
P50, P99 = 2.5, 10.0
"""Milliseconds that are promised; the disk alone can take more."""


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_an_allocate_takes_milliseconds(cluster, agent, table):
    took = []
    for number in range(TRIES):
        name = f"one-{number}"
        before = await spent(agent)
        await place(cluster, a_pod(name), [[share(cluster, number % 8)]])
        await until_running(cluster, name)
        count, seconds = (now - then for now, then in zip(await spent(agent), before, strict=True))
        took.append(seconds / count * MILLI)
        await until_unlocked(cluster)
        await delete(cluster, name, grace=0)
        await until_deleted(cluster, name)

    table.add("one Allocate inside the agent, p50", statistics.median(took), P50, "ms")
    worst = statistics.quantiles(took, n=100)[-1]
    table.add("one Allocate inside the agent, p99", worst, P99, "ms")
    assert TRIES == len(took)


async def spent(agent):
    """How many Allocates were answered, and the seconds that they took together."""
    labels = {"method": "allocate", "code": "OK"}
    found = await readings(agent, **labels)
    name = "hami_agent_rpc_duration_seconds"
    return found.get(f"{name}_count", 0.0), found.get(f"{name}_sum", 0.0)
