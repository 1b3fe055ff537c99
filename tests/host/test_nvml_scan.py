"""Scans through NVML: every fact, one GPU's failure is never another's, nor is its index."""

from pathlib import Path

import pytest

from agent.gpu.nvml import bus_id, numa_node
from agent.model import GpuFault, PciPath, Trouble
from tests.fakes.nvml import FakeGpu, FakeNvml

pytestmark = pytest.mark.looptime(False)

DIRECT = 0


def gpus(count: int = 3, **fields) -> list[FakeGpu]:
    return [
        FakeGpu(f"GPU-{n}", bus=f"00000000:{0x1B + n:02X}:00.0".encode(), minor=n, **fields)
        for n in range(count)
    ]


@pytest.fixture
def library() -> FakeNvml:
    return FakeNvml(gpus())


def put_numa(sys_root: Path, bus: str, text: str) -> None:
    folder = sys_root / "bus/pci/devices" / bus
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(text)


async def test_a_scan_describes_every_gpu(driver, library, tmp_path):
    put_numa(tmp_path, "0000:1c:00.0", "1\n")
    library.gpus[2].mig = 1
    scan = await driver.scan()

    assert ("570.148.08", ()) == (scan.driver_version, scan.faults)
    assert [("GPU-0", 0, 0), ("GPU-1", 1, 1), ("GPU-2", 2, 2)] == [
        (gpu.uuid, gpu.index, gpu.minor) for gpu in scan.gpus
    ]
    assert [81559] * 3 == [gpu.memory_mib for gpu in scan.gpus]
    assert ["0000:1b:00.0", "0000:1c:00.0", "0000:1d:00.0"] == [gpu.pci for gpu in scan.gpus]
    assert [None, 1, None] == [gpu.numa for gpu in scan.gpus]
    assert [False, False, True] == [gpu.mig_enabled for gpu in scan.gpus]


@pytest.mark.parametrize("text", ["-1", "none", ""])
def test_a_numa_node_that_the_kernel_does_not_tell_is_unknown(tmp_path, text):
    put_numa(tmp_path, "0000:1b:00.0", text)

    assert numa_node(tmp_path, "0000:1b:00.0") is None


@pytest.mark.parametrize(
    ("nvml", "sysfs"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("00000001:AF:00.0", "0001:af:00.0"),
        ("0000:3B:00.0", "0000:3b:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("0001E240:01:00.0", "1e240:01:00.0"),
        ("unknown", "unknown"),
    ],
)
def test_a_bus_id_is_written_as_sysfs_writes_it(nvml, sysfs):
    assert sysfs == bus_id(nvml)


@pytest.mark.parametrize(
    ("call", "field", "expected"),
    [
        ("nvmlDeviceGetMemoryInfo", "memory_mib", None),
        ("nvmlDeviceGetMinorNumber", "minor", None),
        ("nvmlDeviceGetMigMode", "mig_enabled", False),
    ],
)
async def test_what_a_gpu_cannot_tell_is_none_or_not_so(driver, library, call, field, expected):
    library.failures[call, 1] = 3
    scan = await driver.scan()

    assert getattr(scan.gpus[1], field) is expected
    assert () == scan.faults


@pytest.mark.parametrize(
    "call",
    [
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetMigMode",
    ],
)
async def test_any_call_that_fails_for_one_gpu_is_a_fault_of_that_gpu_alone(driver, library, call):
    await driver.scan()
    library.failures[call, 1] = 15
    scan = await driver.scan()

    assert ["GPU-0", "GPU-2"] == [gpu.uuid for gpu in scan.gpus]
    assert (GpuFault("GPU-1", "GPU is lost", Trouble.LOST, 1),) == scan.faults


async def test_a_gpu_that_was_never_described_is_named_by_its_index(driver, library):
    library.failures["nvmlDeviceGetUUID", 2] = 999

    assert (GpuFault("index 2", "error 999", index=2),) == (await driver.scan()).faults


async def test_gpus_on_a_bridge_are_linked_to_their_neighbour_only(library, driver):
    library.gpus[0].links = [(DIRECT, library.gpus[1].bus)] * 4
    library.gpus[1].links = [(DIRECT, library.gpus[0].bus)] * 4
    scan = await driver.scan()

    assert [[4, 0], [4, 0], [0, 0]] == [[link.nvlinks for link in gpu.links] for gpu in scan.gpus]


@pytest.mark.parametrize(
    ("level", "path"),
    [(0, PciPath.SAME_BOARD), (10, PciPath.SINGLE_SWITCH), (30, PciPath.HOST_BRIDGE), (7, None)],
)
async def test_the_path_between_two_gpus_is_the_librarys_level(library, driver, level, path):
    library.level = level

    assert [path, path] == [link.path for link in (await driver.scan()).gpus[0].links]


async def test_a_fault_at_an_index_whose_owner_has_moved_names_nobody(driver, library):
    await driver.scan()
    library.gpus = [library.gpus[2], library.gpus[0]]
    library.failures["*", 1] = 15
    scan = await driver.scan()

    assert ["GPU-2"] == [gpu.uuid for gpu in scan.gpus]
    assert [("index 1", True)] == [(fault.gpu, fault.lost) for fault in scan.faults]
