"""160 regions with 1,024 processes on two GPUs, of which the agent could hold all readings at once.

Right: less than 40 MiB together. The chart gives the agent 192 MiB.
"""

import asyncio
import tempfile
import uuid
from pathlib import Path

from agent.regions import HostRegions
from tests.cases.box import a_raw_region, put_region, verdict
from tests.fakes.offload import Inline

COUNT = 160


def resident() -> int:
    """The resident memory of this process, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024


async def read(regions: HostRegions, names: list[str]) -> int:
    """Read in three rounds; how many of the regions were read in all."""
    done = set[str]()
    for _ in range(3):
        done |= {name for name, sums in (await regions.read(names)).items() if sums.region}
    return len(done)


raw = a_raw_region([("", 1 << 30, 30)] * 2, [(2**50 + pid, 1) for pid in range(1024)])
with tempfile.TemporaryDirectory() as made:
    names = [f"{uuid.uuid4()}_a" for _ in range(COUNT)]
    for name in names:
        put_region(Path(made), name, raw)
    before = resident()
    done = asyncio.run(read(HostRegions(Path(made), Inline()), names))
    grown = resident() - before
print(f"{done} of {COUNT} regions read; {grown} MiB more")
verdict(right=grown < 40 and done > 0, wrong="all readings of the node are in memory at once")
