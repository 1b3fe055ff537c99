"""What a round over the regions of a full node costs the agent."""

import datetime as dt
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from agent.regions import HostRegions
from agent.sandbox.hami_core import HAMI_2_9_0, MEMORY_LIMIT, HamiCoreRegion
from agent.usage import use_of
from tests.bench.figures import Figure
from tests.fakes.offload import Inline
from tests.host.proc_node import ProcNode

CONTAINERS = 100
GPUS = tuple(f"GPU-{index:08x}-1111-2222-3333-444444444444" for index in range(8))
PIDS = range(1, 11)
"""The processes of each container; the first two use its GPUs."""
ROUNDS = 20
NOW = dt.datetime(2026, 11, 26, tzinfo=dt.UTC)


async def regions() -> list[Figure]:
    """Read 100 regions, know which of their processes exist, and sum what they use."""
    with tempfile.TemporaryDirectory() as made:
        top = Path(made)
        node = ProcNode(top)
        names = list(_containers(top, node))
        adapter = HostRegions(top, Inline(), node.processes)
        await adapter.read(names)
        rounds, sums = list[float](), list[float]()
        for _ in range(ROUNDS):
            begun = time.process_time()
            readings = await adapter.read(names)
            read = time.process_time()
            uses = [use_of(sums, NOW) for sums in readings.values()]
            rounds.append((read - begun) * 1000)
            sums.append((time.process_time() - read) * 1000)
        assert {2} == {use.processes for use in uses}
    how = f"CPU of the process; {CONTAINERS} containers of 8 GPUs, 2 of 10 processes on them"
    return [
        Figure("regions_read", "a round over all regions, and who lives", "ms", rounds, how, 25),
        Figure("regions_sum", "the sums of a round", "ms", sums, how),
    ]


def _containers(top: Path, node: ProcNode) -> Iterator[str]:
    for number in range(CONTAINERS):
        uid = f"6f1c1f0e-8f5a-4a52-9d2e-{number:012x}"
        name = f"{uid}_main"
        directory = top / "vgpu/containers" / name
        directory.mkdir(parents=True)
        region = HamiCoreRegion(directory / "usage.cache", HAMI_2_9_0)
        for pid in PIDS[:2]:
            process = region.start(pid, {MEMORY_LIMIT: "8g"}, NOW)
            for gpu in range(len(GPUS)):
                process.allocate(gpu, 1 << 30)
        region.name_gpus(GPUS)
        node.container(PIDS, pod=f"pod{uid}", mounted=name)
        yield name
