"""The library file and the sessions with it: found, begun, ended and replaced, around nobody."""

import asyncio
import contextlib
import shutil
from pathlib import Path

import pytest

from agent.core.errors import DriverError, DriverMissing
from agent.core.health.reports import ProbeOutcome
from agent.core.inventory.gpu import GpuUuid
from agent.host.nvml.driver import NvmlDriver
from agent.host.nvml.library import library_below, replaced
from agent.host.nvml.library import pynvml as the_library
from tests.fakes.nvml import until
from tests.fakes.nvml_stub import NvmlStub

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

UUIDS = [GpuUuid(f"GPU-5708-{slot}") for slot in range(16)]
MISMATCH = 18


@pytest.fixture
def driver(stub_driver: NvmlDriver) -> NvmlDriver:
    return stub_driver


async def answers_again(driver: NvmlDriver) -> None:
    """Until the driver's first GPU passes its probe, for a while.

    A call has returned in the library before the driver's thread knows of it.
    """
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(DriverError):
                if (await driver.probe(UUIDS[0])).outcome is ProbeOutcome.PASSED:
                    return
            await asyncio.sleep(0.01)


async def test_a_driver_that_hangs_as_a_whole_answers_again_when_it_is_back(driver, stub):
    await driver.scan()
    stub.hang()
    with pytest.raises(DriverError, match="does not answer"):
        await driver.scan()
    assert ProbeOutcome.SILENT is (await driver.probe(UUIDS[0])).outcome
    assert 2 == stub.inside
    stub.hang(hung=False)
    await answers_again(driver)

    assert 3 == len((await driver.scan()).gpus)
    assert (0, 1) == (stub.inside, stub.sessions)


async def test_another_library_is_not_taken_while_a_call_may_come_back_from_the_first(
    built, tmp_path
):
    old, new = (
        NvmlStub(Path(shutil.copy(built, tmp_path / f"libnvidia-ml.so.{version}")))
        for version in ("570.1", "575.2")
    )
    new.version("575.2")
    link = tmp_path / "libnvidia-ml.so.1"
    link.symlink_to(old.path.name)
    driver = NvmlDriver(the_library(), path=link, sys_root=tmp_path, deadline=0.3)
    await driver.scan()
    old.hang("nvmlDeviceGetHandleByUUID", 0)
    assert ProbeOutcome.SILENT is (await driver.probe(UUIDS[0])).outcome
    old.end()
    link.unlink()
    link.symlink_to(new.path.name)
    with pytest.raises(DriverError, match="session"):
        await driver.scan()
    with pytest.raises(DriverError, match=r"is not the loaded library.* has not returned"):
        await driver.scan()
    assert 0 == new.calls("nvmlInitWithFlags")

    old.hang("nvmlDeviceGetHandleByUUID", 0, hung=False)
    await until(lambda: old.inside == 0)
    await answers_again(driver)
    assert "575.2" == (await driver.scan()).driver_version
    await driver.close()
    assert (0, 0, 0) == (new.sessions, old.undefined, new.undefined)


async def test_another_library_takes_the_place_of_the_first(driver, stub_path, tmp_path):
    await driver.scan()
    copy = Path(shutil.copy(stub_path, tmp_path / "other.so"))
    second = NvmlDriver(the_library(), path=copy, sys_root=tmp_path)
    NvmlStub(copy).lose(0)

    assert [1, 2] == [gpu.index for gpu in (await second.scan()).gpus]
    await second.close()


@pytest.mark.parametrize("place", ["usr/lib64", "usr/lib/x86_64-linux-gnu", "lib64"])
async def test_the_library_of_a_mounted_host_is_found(built, tmp_path, place):
    below = tmp_path / "root" / place / "libnvidia-ml.so.1"
    below.parent.mkdir(parents=True)
    shutil.copy(built, below)
    driver = NvmlDriver(the_library(), driver_root=tmp_path / "root", sys_root=tmp_path)

    assert "999.1" == (await driver.scan()).driver_version
    await driver.close()


async def test_a_driver_that_is_upgraded_is_used_once_both_halves_are_there(built, tmp_path):
    old, new = (
        NvmlStub(Path(shutil.copy(built, tmp_path / f"libnvidia-ml.so.{version}")))
        for version in ("570.1", "575.2")
    )
    new.version("575.2")
    link = tmp_path / "libnvidia-ml.so.1"
    link.symlink_to(old.path.name)
    driver = NvmlDriver(the_library(), path=link, sys_root=tmp_path)
    await driver.scan()

    old.fail("any", code=MISMATCH)  # the kernel's half is the new one already
    with pytest.raises(DriverMissing, match="differ in version"):
        await driver.scan()
    with pytest.raises(DriverMissing, match="differ in version"):
        await driver.probe(UUIDS[0])
    link.unlink()
    link.symlink_to(new.path.name)

    assert "575.2" == (await driver.scan()).driver_version
    await driver.close()
    assert 0 == new.sessions


def test_what_took_the_place_of_a_loaded_library_is_found_by_its_link(tmp_path):
    for version in ("570.1", "575.2"):
        (tmp_path / f"libnvidia-ml.so.{version}").touch()
    (tmp_path / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.575.2")
    maps = tmp_path / "maps"
    maps.write_text(
        f"7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libc.so.6\n7f01-7f02 rw-p 0 00:00 0\n"
        f"7f02-7f03 r-xp 00000000 08:01 2 {tmp_path}/libnvidia-ml.so.570.1 (deleted)\n"
    )

    assert tmp_path / "libnvidia-ml.so.575.2" == replaced(maps)


def test_a_library_that_is_still_the_one_behind_its_link_was_not_replaced(tmp_path):
    (tmp_path / "libnvidia-ml.so.570.1").touch()
    (tmp_path / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.570.1")
    maps = tmp_path / "maps"
    maps.write_text(f"7f02-7f03 r-xp 00000000 08:01 2 {tmp_path}/libnvidia-ml.so.570.1\n")

    assert None is replaced(maps)
    assert None is replaced(tmp_path / "none")


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


async def test_a_library_that_appears_later_is_used(built, tmp_path):
    file = tmp_path / "libnvidia-ml.so.1"
    driver = NvmlDriver(the_library(), path=file, sys_root=tmp_path)
    with pytest.raises(DriverMissing):
        await driver.scan()
    shutil.copy(built, file)

    assert 3 == len((await driver.scan()).gpus)
    await driver.close()
