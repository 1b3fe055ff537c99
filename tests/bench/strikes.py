"""From an XID to the list that takes its GPU away, at an agent at rest; all GPUs at once."""

import asyncio
import contextlib

from agent.sandbox import hardware_talk as talk
from agent.sandbox.hardware_talk import ask
from agent.sandbox.lab.cluster import SandboxCluster
from tests.bench.figures import Figure, percentile
from tests.bench.lab import SETTLED, next_line, next_list, reader, served

REST = 0.3
"""Seconds without a list after which an agent is at rest: what follows a list waits 50 ms."""

SIZES = ((8, 1), (16, 100), (16, 1000))
"""GPUs, and slices of each."""


async def events(runs: int) -> list[Figure]:
    """XID → list on the stream, by the number of slices; all GPUs lost at once."""
    figures: list[Figure] = []
    for gpus, split_count in SIZES:
        figures += await _events(gpus, split_count, runs)
    return [*figures, *await _lost(8, 1000, runs)]


async def _events(gpus: int, split_count: int, runs: int) -> list[Figure]:
    """Strike one GPU after the other, each time an agent at rest."""
    took: list[float] = []
    known: list[float] = []
    for _ in range(runs):
        async with served(gpus, split_count) as cluster, reader(cluster) as lists:
            history = cluster.kubelet.history
            await next_line(lists)
            for gpu in range(gpus):
                await at_rest(lists)
                seen = len(history.of("listed"))
                begun = asyncio.get_running_loop().time()
                await _strike(cluster, gpu)
                known.append((await next_list(cluster, seen) - begun) * 1000)
                took.append((await next_line(lists) - begun) * 1000)
    slices = gpus * split_count
    how = (
        "from the request to the simulated GPU of an agent at rest to the bytes of the list at a "
        f"second stream; {runs} agents, each GPU once"
    )
    model = "the same to the decoded list at the kubelet model, its checkpoint written"
    what, name = f"XID → list, {slices:,} slices", f"xid_to_list_{slices}"
    bound = 20 if slices <= 1600 else None
    return [
        Figure(f"{name}_p50", f"{what}, p50", "ms", took, how),
        Figure(f"{name}_p99", f"{what}, p99", "ms", took, how, bound, percentile(took, 99)),
        Figure(f"xid_to_kubelet_{slices}", f"{what}: the kubelet model knows", "ms", known, model),
    ]


async def _lost(gpus: int, split_count: int, runs: int) -> list[Figure]:
    """All GPUs fall off the bus at once, each with its XID: how many lists, and when the last."""
    counts: list[float] = []
    took: list[float] = []
    for _ in range(runs):
        async with served(gpus, split_count) as cluster, reader(cluster) as lists:
            await next_line(lists)
            await at_rest(lists)
            begun = asyncio.get_running_loop().time()
            async with asyncio.TaskGroup() as group:
                for gpu in range(gpus):
                    group.create_task(_strike(cluster, gpu))
            came = [await next_line(lists), *await at_rest(lists, SETTLED)]
            counts.append(len(came))
            took.append((came[-1] - begun) * 1000)
    what = f"{gpus} GPUs of {split_count:,} slices lost at once"
    how = (
        f"from the first request to the simulated GPUs to the bytes of the last list; {runs} agents"
    )
    return [
        Figure("lost_lists", f"{what}: lists, at most", "", counts, how, 1, max(counts)),
        Figure("lost_to_list", f"{what} → last list", "ms", took, how, 25),
    ]


async def _strike(cluster: SandboxCluster, gpu: int) -> None:
    await ask(cluster.places.hardware_socket, talk.XidRequest(gpu=str(gpu), xid=79))


async def at_rest(lists: asyncio.StreamReader, rest: float = REST) -> list[float]:
    """Wait until no list has come for so long; when those came that did."""
    came: list[float] = []
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(rest):
                line = await lists.readline()
            if not line:
                raise RuntimeError("the reader of lists has ended")
            came.append(float(line.split()[0]))
    return came
