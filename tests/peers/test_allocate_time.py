"""How long an Allocate takes inside the agent: this node's disk and kubelet included.

Beside it what the disk and the kubelet take by themselves, asked just after from a process of its
own: what is left is the agent's.
"""

import asyncio
import contextlib
import statistics
import sys
from pathlib import Path

import pytest

from tests.bench.allocates import STEPS
from tests.peers.lab.faces import readings
from tests.peers.lab.node_state import until_unlocked
from tests.peers.lab.placement import place, share
from tests.peers.lab.pods import delete, until_deleted, until_running
from tests.peers.lab.workloads import a_pod, as_if_generated

TRIES = 40
MILLI = 1000
P50, P99 = 2.5, 10.0
"""Milliseconds that are promised; the disk alone can take more."""
ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_an_allocate_takes_milliseconds(cluster, agent, table):
    took, disk, question = [], [], []
    waits: dict[str, list[float]] = {step: [] for step in STEPS}
    state = cluster.space.view / "var/lib/hami-agent"
    async with toll(state.parent / "toll", cluster.kubelet.pod_resources) as asked:
        for number in range(TRIES):
            name = f"one-{number}"
            before, waited = await spent(agent), await waited_for(agent)
            await place(cluster, as_if_generated(a_pod(name)), [[share(cluster, number % 8)]])
            await until_running(cluster, name)
            count, seconds = (
                now - then for now, then in zip(await spent(agent), before, strict=True)
            )
            took.append(seconds / count * MILLI)
            for step, total in (await waited_for(agent)).items():
                waits[step].append((total - waited[step]) * MILLI)
            await until_unlocked(cluster)
            alone = await asked(f"{(state / 'state.json').stat().st_size} default {name}")
            disk.append(alone[0])
            question.append(alone[1])
            await delete(cluster, name, grace=0)
            await until_deleted(cluster, name)

    table.add("one Allocate inside the agent, p50", statistics.median(took), P50, "ms")
    worst = statistics.quantiles(took, n=100)[-1]
    table.add("one Allocate inside the agent, p99", worst, P99, "ms")
    for step, what in STEPS.items():
        table.add(f"{what}, p50", statistics.median(waits[step]), None, "ms")
    own = [one - sum(parts) for one, *parts in zip(took, *waits.values(), strict=True)]
    table.add("… the agent's own: decode, match, encode, p50", statistics.median(own), None, "ms")
    table.add("… the same on disk, alone, p50", statistics.median(disk), None, "ms")
    table.add("… the same question, alone, p50", statistics.median(question), None, "ms")
    assert TRIES == len(took)


@contextlib.asynccontextmanager
async def toll(directory, socket):
    """Ask tests.bench.toll: how many ms its two halves take, each time it is told a line."""
    directory.mkdir(exist_ok=True)
    command = sys.executable, "-m", "tests.bench.toll", str(directory), str(socket)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)

    async def asked(line):
        process.stdin.write(f"{line}\n".encode())
        async with asyncio.timeout(10):
            return tuple(map(float, (await process.stdout.readline()).split()))

    try:
        yield asked
    finally:
        process.kill()
        await process.wait()


async def waited_for(agent):
    """The seconds that all Allocates together waited, by step."""
    name = "hami_agent_allocate_wait_seconds_sum"
    return {step: (await readings(agent, step=step)).get(name, 0.0) for step in STEPS}


async def spent(agent):
    """How many Allocates were answered, and the seconds that they took together."""
    labels = {"method": "allocate", "code": "OK"}
    found = await readings(agent, **labels)
    name = "hami_agent_rpc_duration_seconds"
    return found.get(f"{name}_count", 0.0), found.get(f"{name}_sum", 0.0)
