"""The real pynvml over a library of our own: what only a real library file shows."""

import ctypes
from pathlib import Path

import pynvml
import pytest

from agent.core.errors import DriverMissing
from agent.core.events import ProbeOutcome
from agent.host.nvml.driver import NvmlDriver
from agent.host.nvml.library import library_below
from agent.host.nvml.library import pynvml as the_library
from tests.fakes import nvml_stub

pytestmark = pytest.mark.looptime(False)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(autouse=True)
def forgetful():
    """pynvml keeps the library it has loaded: the next test starts without."""
    yield
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.fixture
async def driver(path: Path, tmp_path: Path):
    driver = NvmlDriver(the_library(), path=path, sys_root=tmp_path, deadline=0.3)
    yield driver
    await driver.close()


async def test_a_named_library_is_used(driver):
    scan = await driver.scan()

    assert ("999.1", ()) == (scan.driver_version, scan.faults)
    assert ["GPU-5708-0", "GPU-5708-1", "GPU-5708-2"] == [gpu.uuid for gpu in scan.gpus]
    assert ["0000:af:00.0", "0000:b0:00.0", "0000:b1:00.0"] == [gpu.pci for gpu in scan.gpus]
    assert [16384, 16384, None] == [gpu.memory_mib for gpu in scan.gpus]


async def test_calls_that_an_old_driver_lacks_cost_nothing(driver):
    scan = await driver.scan()

    assert [0, 0] == [link.nvlinks for link in scan.gpus[0].links]
    assert ProbeOutcome.PASSED is (await driver.probe(scan.gpus[0].uuid)).outcome


async def test_a_call_that_hangs_in_the_library_leaves_the_loop_and_the_others_alone(driver, path):
    stub = ctypes.CDLL(str(path))
    await driver.scan()
    stub.stub_hang(1, 1)
    scan = await driver.scan()
    stub.stub_hang(1, 0)

    assert [0, 2] == [gpu.index for gpu in scan.gpus]
    assert ["GPU-5708-1"] == [fault.gpu for fault in scan.faults]


async def test_another_library_takes_the_place_of_the_first(driver, path, tmp_path):
    await driver.scan()
    copy = tmp_path / "other.so"
    copy.write_bytes(path.read_bytes())
    second = NvmlDriver(the_library(), path=copy, sys_root=tmp_path)
    ctypes.CDLL(str(copy)).stub_lose(0, 1)

    assert [1, 2] == [gpu.index for gpu in (await second.scan()).gpus]
    await second.close()


@pytest.mark.parametrize("place", ["usr/lib64", "usr/lib/x86_64-linux-gnu", "lib64"])
async def test_the_library_of_a_mounted_host_is_found(path, tmp_path, place):
    below = tmp_path / "root" / place / "libnvidia-ml.so.1"
    below.parent.mkdir(parents=True)
    below.write_bytes(path.read_bytes())
    driver = NvmlDriver(the_library(), driver_root=tmp_path / "root", sys_root=tmp_path)

    assert "999.1" == (await driver.scan()).driver_version
    await driver.close()


def test_nothing_is_found_where_no_driver_is_mounted(tmp_path):
    assert None is library_below(tmp_path)
    assert None is library_below(None)


async def test_a_file_that_is_no_library_is_named(tmp_path):
    file = tmp_path / "libnvidia-ml.so.1"
    file.write_text("not a library")
    driver = NvmlDriver(the_library(), path=file)
    with pytest.raises(DriverMissing, match=r"libnvidia-ml\.so\.1 cannot be loaded"):
        await driver.scan()
    await driver.close()
