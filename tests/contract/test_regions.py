"""Shared regions: one body over the adapter, with HAMi-core's model, and over the fake."""

import datetime as dt

import msgspec
import pytest

from agent.errors import StateError
from agent.hami.region import RegionChange, RegionState
from agent.regions import HostRegions
from agent.sandbox.hami_core import (
    CORE_LIMIT,
    HAMI_2_4_0,
    HAMI_2_8_0,
    HAMI_2_8_1,
    HAMI_2_9_0,
    MEMORY_LIMIT,
    HamiCoreRegion,
)
from tests.fakes.offload import Inline
from tests.fakes.regions import MemoryRegions, RegionReading
from tests.hami_regions import read_bytes
from tests.host.region_dirs import FILE, NAME, OTHER

NOW = dt.datetime(2026, 11, 26, tzinfo=dt.UTC)
MISSING = "6f1c1f0e-8f5a-4a52-9d2e-6b8b8a1d0009_main"
LIBRARIES = {"v0": HAMI_2_4_0, "v1.1": HAMI_2_8_0, "v1.1s": HAMI_2_8_1, "v1.2": HAMI_2_9_0}


def in_use(path, library):
    """A region of two GPUs, which a process uses."""
    region = HamiCoreRegion(path, library)
    environment = {MEMORY_LIMIT: "8g", CORE_LIMIT: "30"}
    process = region.start(7, environment, NOW)
    region.name_gpus(["GPU-a", "GPU-b"])
    process.allocate(0, 1 << 30)
    process.watch(0, 37)
    return region


@pytest.fixture(params=["disk", "memory"])
def kind(request):
    return request.param


@pytest.fixture(params=LIBRARIES.values(), ids=list(LIBRARIES))
def regions(request, kind, tmp_path):
    """One container with a region in use, one whose region begins."""
    containers = tmp_path / "vgpu/containers"
    for name in (NAME, OTHER):
        (containers / name).mkdir(parents=True)
    region = in_use(containers / NAME / FILE, request.param)
    (containers / OTHER / FILE).touch()
    if kind == "disk":
        return HostRegions(tmp_path, Inline())
    memory = MemoryRegions()
    memory.readings[NAME] = read_bytes(region.path.read_bytes())
    memory.readings[OTHER] = RegionReading(RegionState.INITIALISING)
    return memory


async def sums_of(regions, name=NAME):
    return (await regions.read([name]))[name]


async def region_of(regions, name=NAME):
    return (await sums_of(regions, name)).region


async def test_each_name_that_is_asked_for_has_a_reading_and_no_other(regions):
    readings = await regions.read([MISSING, OTHER, NAME])

    assert {
        MISSING: RegionState.ABSENT,
        OTHER: RegionState.INITIALISING,
        NAME: RegionState.READABLE,
    } == {name: reading.state for name, reading in readings.items()}
    assert {} == await regions.read([])


async def test_what_the_processes_use_is_read(regions):
    region = await region_of(regions)

    assert [("GPU-a", 8 << 30, 30), ("GPU-b", 8 << 30, 30)] == [
        (gpu.uuid, gpu.memory_limit, gpu.core_limit) for gpu in region.gpus
    ]
    sums = await sums_of(regions)
    assert (1, 1 << 30, (37, 0)) == (sums.processes, sums.memory[0].total, sums.sm_percent)


async def test_who_is_held_back_is_found(regions):
    assert [] == list(await regions.held())

    await regions.write({NAME: RegionChange(recent_kernel=-1)})

    assert [NAME] == list(await regions.held())


@pytest.mark.parametrize(
    "change",
    [
        RegionChange(),
        RegionChange(is_limiting=False),
        RegionChange(recent_kernel=-1),
        RegionChange(True, 0),
    ],
    ids=["nothing", "switch", "recent_kernel", "both"],
)
async def test_a_change_changes_what_it_names_and_nothing_else(regions, change):
    before = await region_of(regions)

    assert {} == await regions.write({NAME: change})

    expected = before
    if change.is_limiting is not None:
        expected = msgspec.structs.replace(expected, is_limiting=change.is_limiting)
    if change.recent_kernel is not None:
        expected = msgspec.structs.replace(expected, recent_kernel=change.recent_kernel)
    assert expected == await region_of(regions)


async def test_where_no_region_is_nothing_is_written_and_the_reason_is_said(regions):
    change = RegionChange(recent_kernel=-1)

    refused = await regions.write({MISSING: change, OTHER: change, NAME: change})

    assert {MISSING, OTHER} == refused.keys()
    assert all(refused.values())
    assert -1 == (await region_of(regions)).recent_kernel


async def test_without_the_directories_every_call_fails(regions, kind, tmp_path):
    if kind == "disk":
        (tmp_path / "vgpu").rename(tmp_path / "away")
        (tmp_path / "vgpu").touch()
    else:
        regions.broken = "the disk is gone"

    with pytest.raises(StateError):
        await regions.read([NAME])
    with pytest.raises(StateError):
        await regions.write({NAME: RegionChange()})
