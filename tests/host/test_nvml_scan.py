"""Scans through NVML: every fact, one GPU's failure is never another's, nor is its index."""

from pathlib import Path

import pytest

from agent.gpu.nvml import bus_id, numa_node
from agent.model import GpuFault, PciPath, Trouble

pytestmark = pytest.mark.looptime(False)


def put_numa(sys_root: Path, bus: str, text: str) -> None:
    folder = sys_root / "bus/pci/devices" / bus
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(text)


async def test_a_scan_describes_every_gpu(driver, stub, tmp_path):
    put_numa(tmp_path, "0000:b0:00.0", "1\n")
    stub.set(2, mig=1)
    scan = await driver.scan()

    assert ("999.1", ()) == (scan.driver_version, scan.faults)
    assert [("GPU-5708-0", 0, 0), ("GPU-5708-1", 1, 1), ("GPU-5708-2", 2, 2)] == [
        (gpu.uuid, gpu.index, gpu.minor) for gpu in scan.gpus
    ]
    assert [16384, 16384, None] == [gpu.memory_mib for gpu in scan.gpus]
    assert ["0000:af:00.0", "0000:b0:00.0", "0000:b1:00.0"] == [gpu.pci for gpu in scan.gpus]
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
async def test_what_a_gpu_cannot_tell_is_none_or_not_so(driver, stub, call, field, expected):
    stub.fail(call, 1, code=3)
    scan = await driver.scan()

    assert getattr(scan.gpus[1], field) is expected
    assert () == scan.faults


@pytest.mark.parametrize(
    "call",
    [
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetMigMode",
    ],
)
async def test_any_call_that_fails_for_one_gpu_is_a_fault_of_that_gpu_alone(driver, stub, call):
    await driver.scan()
    stub.fail(call, 1, code=15)
    scan = await driver.scan()

    assert ["GPU-5708-0", "GPU-5708-2"] == [gpu.uuid for gpu in scan.gpus]
    assert (GpuFault("GPU-5708-1", "GPU is lost", Trouble.LOST, 1),) == scan.faults


async def test_a_gpu_that_was_never_described_is_named_by_its_index(driver, stub):
    stub.fail("nvmlDeviceGetUUID", 2, code=999)

    assert (GpuFault("index 2", "Unknown Error", index=2),) == (await driver.scan()).faults


async def test_gpus_on_a_bridge_are_linked_to_their_neighbour_only(stub, driver):
    stub.set(0, nvlinks=4, bridged=2)
    stub.set(1, nvlinks=4, bridged=1)
    scan = await driver.scan()

    assert [[4, 0], [4, 0], [0, 0]] == [[link.nvlinks for link in gpu.links] for gpu in scan.gpus]


@pytest.mark.parametrize(
    ("level", "path"),
    [(0, PciPath.SAME_BOARD), (10, PciPath.SINGLE_SWITCH), (30, PciPath.HOST_BRIDGE), (7, None)],
)
async def test_the_path_between_two_gpus_is_the_librarys_level(stub, driver, level, path):
    stub.set(0, level=level)

    assert [path, path] == [link.path for link in (await driver.scan()).gpus[0].links]


async def test_a_fault_at_an_index_whose_owner_has_moved_names_nobody(driver, stub):
    await driver.scan()
    stub.order([2, 0])
    stub.lose(0)
    scan = await driver.scan()

    assert ["GPU-5708-2"] == [gpu.uuid for gpu in scan.gpus]
    assert [("index 1", True)] == [(fault.gpu, fault.lost) for fault in scan.faults]
