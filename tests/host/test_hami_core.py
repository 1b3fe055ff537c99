"""What the agent reads and writes in a region, against HAMi-core's own library in real processes.

Only where HAMI_CORE_LIBRARY names that library; see CONTRIBUTING.md. The tests of
agent/hami/region.py hold every layout to files that the library wrote.
"""

import datetime as dt
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec
import pytest

from agent.hami.region import RegionChange, read_region
from agent.sandbox.hami_core import (
    HAMI_2_4_0,
    HAMI_2_8_0,
    HAMI_2_8_1,
    HAMI_2_9_0,
    SWEEP,
    HamiCoreProcess,
    HamiCoreRegion,
)
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


async def launched_until_held(process: CudaProcess) -> None:
    """A new setting reaches a process up to 120 ms later."""
    for _ in range(10_000):
        process.begin("launch", 1)
        if await process.is_held():
            return
    pytest.fail("no launch was held")


async def test_launches_of_a_limited_container_are_held_below_zero(container: CoreContainer):
    process = await container.start(CUDA_DEVICE_SM_LIMIT="50")
    await container.write(RegionChange(recent_kernel=-1))

    await launched_until_held(process)
    launches = container.cuda.launches(process.host_pid)
    await container.write(RegionChange(recent_kernel=0))

    assert [0] == await process.end()
    assert launches + 1 == container.cuda.launches(process.host_pid)
    assert 2 == (await container.read()).recent_kernel


# The model of HAMi-core against its own library: the same history leaves the same region.


NOW: Final = dt.datetime(2026, 11, 26, tzinfo=dt.UTC)
MODELS: Final = {"v0": HAMI_2_4_0, "v1.1": HAMI_2_8_0, "v1.1s": HAMI_2_8_1, "v1.2": HAMI_2_9_0}


async def test_the_model_of_the_library_leaves_the_same_region(
    container: CoreContainer, tmp_path: Path
):
    """All on one GPU: the library of 2.4.0 takes the size of a context from the last one's list."""
    pair = Pair(container, tmp_path / "model.cache")
    killed = await pair.start()
    moved, left, last = [await pair.start() for _ in range(3)]
    await pair.allocate(moved, 100)
    await pair.allocate(left, 50)
    await pair.agree()
    await killed.kill()
    await pair.agree()
    await pair.start(dead={killed.pid})
    await pair.agree()
    await last.leave()
    pair.models[last.pid].exit()
    await pair.agree()
    assert 0 == await moved.do("launch", 1)
    pair.models[moved.pid].launch(NOW)
    await pair.agree()
    await container.write(RegionChange(recent_kernel=0, is_limiting=False))
    pair.model.put(pair.model.offsets.tail + 4, "ii", 0, 0)
    await pair.allocate(left, 70)
    assert 0 == await left.do("launch", 1)
    pair.models[left.pid].launch(NOW)
    await pair.agree()


async def test_the_model_loses_the_same_slots(container: CoreContainer, tmp_path: Path):
    """More processes end than one start would remove if they had been killed."""
    pair = Pair(container, tmp_path / "model.cache")
    ended = [await pair.start() for _ in range(SWEEP + 2)]
    lost = await pair.start()
    for process in ended:
        await process.leave()
        pair.models[process.pid].exit()
    await pair.agree()
    await pair.start()
    await pair.agree()
    await pair.allocate(lost, 30)
    await pair.agree()
    await lost.leave()
    pair.models[lost.pid].exit()
    await pair.agree()


class Pair:
    """A region of the library and one of its model, whose processes do the same."""

    def __init__(self, container: CoreContainer, path: Path) -> None:
        self._container = container
        self._path = path
        self.model: HamiCoreRegion
        self.models: dict[int, HamiCoreProcess] = {}

    async def start(self, dead: Collection[int] = ()) -> CudaProcess:
        process = await self._container.start(CUDA_DEVICE_MEMORY_LIMIT_0="16g")
        region = await self._container.read()
        environment = self._container.environment(CUDA_DEVICE_MEMORY_LIMIT_0="16g")
        if not self.models:
            self.model = HamiCoreRegion(self._path, MODELS[region.layout])
        model = self.model.start(process.pid, environment, NOW, dead)
        self.model.name_gpus([gpu.uuid for gpu in region.gpus])
        model.find_host_pid(process.host_pid)
        model.allocate(0, self._container.cuda.context, "context")
        self.models[process.pid] = model
        return process

    async def allocate(self, process: CudaProcess, mib: int) -> None:
        assert 0 == await process.do("allocate", mib)
        self.models[process.pid].allocate(0, mib * MIB)

    async def agree(self) -> None:
        """Both are read as the same, but for the time."""
        text = self._path.read_bytes()
        model = read_region(len(text), lambda length, offset: text[offset : offset + length])
        region = await self._container.read()
        replace = msgspec.structs.replace
        assert replace(model, last_kernel=None) == replace(region, last_kernel=None)
