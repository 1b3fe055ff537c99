"""What the agent reads and writes in a region, against HAMi-core's own library in real processes.

Only where HAMI_CORE_LIBRARY names that library; see CONTRIBUTING.md. The tests of
agent/hami/region.py hold every layout to files that the library wrote.
"""

from pathlib import Path

import pytest

from agent.hami.region import Region, RegionChange, RegionProcess
from tests.host.core_space import (
    BESIDE_LIBRARY,
    LIBRARY,
    MIB,
    CoreContainer,
    CudaProcess,
    open_container,
)

pytestmark = BESIDE_LIBRARY


@pytest.fixture
async def container(tmp_path: Path, built_cuda: Path):
    async with open_container(tmp_path, built_cuda, Path(LIBRARY)) as opened:
        yield opened


def slot_of(region: Region, process: CudaProcess) -> RegionProcess | None:
    found = [one for one in region.processes if one.pid == process.pid]
    assert len(found) <= 1
    return found[0] if found else None


async def launched_until_held(process: CudaProcess) -> None:
    """A new setting reaches a process up to 120 ms later."""
    for _ in range(10_000):
        process.begin("launch", 1)
        if await process.is_held():
            return
    pytest.fail("no launch was held")


async def test_the_region_tells_what_the_processes_did(container: CoreContainer):
    context = container.cuda.context
    one, other = await container.start(gpu=0), await container.start(gpu=1)
    assert [0, 0, 0] == [
        await one.do("allocate", 100),
        await one.do("managed", 50),
        await one.do("free"),
    ]
    assert 0 == await other.do("allocate", 70)

    region = await container.read()

    assert [1000 * MIB, 2000 * MIB] == [gpu.memory_limit for gpu in region.gpus]
    assert [one.pid, other.pid] == [process.pid for process in region.processes]
    first, second = slot_of(region, one).memory[0], slot_of(region, other).memory[1]
    assert (context, 0, 100 * MIB, context + 100 * MIB) == (
        first.context,
        first.module,
        first.buffer,
        first.total,
    )
    assert second.total - second.context == second.buffer


async def test_a_killed_process_stays_in_its_slot_until_another_starts(container: CoreContainer):
    killed, left = await container.start(), await container.start()
    await killed.do("allocate", 100)

    await killed.kill()
    reading = await container.reading()
    await container.start()
    after = await container.read()

    assert reading.region is not None
    before = slot_of(reading.region, killed)
    assert before is not None
    assert container.cuda.context + 100 * MIB == before.memory[0].total
    assert frozenset({left.pid}) == reading.alive  # by the host's /proc
    assert None is slot_of(after, killed)
    assert None is not slot_of(after, left)


async def test_launches_of_a_limited_container_are_held_below_zero(container: CoreContainer):
    process = await container.start(CUDA_DEVICE_SM_LIMIT="50")
    await container.write(RegionChange(recent_kernel=-1))

    await launched_until_held(process)
    launches = container.cuda.launches(process.host_pid)
    await container.write(RegionChange(recent_kernel=0))

    assert [0] == await process.end()
    assert launches + 1 == container.cuda.launches(process.host_pid)
    assert 2 == (await container.read()).recent_kernel
