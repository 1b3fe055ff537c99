"""The real pynvml over a library of our own: what only a real library file shows."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from agent.errors import DriverMissing
from agent.gpu import nvml
from agent.gpu.driver import NvmlDriver
from agent.gpu.nvml import successor
from agent.model import (
    DriverEvent,
    EventKind,
    FabricState,
    GpuSample,
    GpuSigns,
    GpuUuid,
    PciPath,
    ProbeOutcome,
    RecoveryAction,
    Trouble,
)
from tests.fakes import nvml_stub
from tests.fakes.nvml_stub import NvmlStub, until

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

UUIDS = [GpuUuid(f"GPU-5708-{slot}") for slot in range(16)]


def listen(driver: NvmlDriver) -> AsyncGenerator[DriverEvent, None]:
    events = driver.events()
    assert isinstance(events, AsyncGenerator)
    return events


async def hears(driver: NvmlDriver, cause) -> DriverEvent:
    """The first event; `cause` is repeated until it is heard."""
    events = listen(driver)
    async with contextlib.aclosing(events), asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        heard = tasks.create_task(events.__anext__())
        while not heard.done():
            cause()
            await asyncio.wait([heard], timeout=0.02)
    return heard.result()


async def test_a_named_library_is_used(driver):
    scan = await driver.scan()

    assert ("999.1", ()) == (scan.driver_version, scan.faults)
    assert UUIDS[:3] == [gpu.uuid for gpu in scan.gpus]
    assert ["0000:af:00.0", "0000:b0:00.0", "0000:b1:00.0"] == [gpu.pci for gpu in scan.gpus]
    assert [16384, 16384, None] == [gpu.memory_mib for gpu in scan.gpus]
    assert [(PciPath.SAME_CPU, 0)] * 2 == [(link.path, link.nvlinks) for link in scan.gpus[0].links]


async def test_the_signs_come_through_the_librarys_structures(driver, stub):
    stub.set(1, rows_pending=1, pages_pending=1, recovery=4)

    assert (
        GpuSigns(
            rows_pending=True,
            rows_failed=False,
            pages_pending=True,
            recovery=RecoveryAction.DRAIN_AND_RESET,
        )
        == (await driver.probe(UUIDS[1])).signs
    )


@pytest.mark.parametrize(
    ("fabric", "status", "state"),
    [
        (0, 0, None),
        (1, 0, FabricState.NOT_STARTED),
        (2, 0, FabricState.IN_PROGRESS),
        (3, 0, FabricState.COMPLETED),
        (3, 999, FabricState.FAILED),
    ],
)
async def test_whether_a_gpu_has_joined_its_fabric_is_told(driver, stub, fabric, status, state):
    stub.set(1, fabric=fabric, fabric_status=status)

    assert state is (await driver.probe(UUIDS[1])).signs.fabric


async def test_use_comes_through_the_librarys_structures(driver, stub):
    stub.set(0, gpu_percent=93, memory_percent=41, used=7 << 30, reserved=616 << 20)
    stub.set(0, celsius=41, milliwatts=70_150, ecc_life_corrected=9, ecc_life_uncorrected=-1)

    wanted = GpuSample(UUIDS[0], 93, 41, 7168, 616, 41, 70_150, 9, None)
    assert wanted == await driver.sample(UUIDS[0])


async def test_calls_that_an_old_driver_lacks_cost_nothing(tmp_path):
    library = nvml_stub.build(tmp_path, "-DOLD_DRIVER")
    driver = NvmlDriver(path=library, sys_root=tmp_path)
    scan = await driver.scan()
    probe = await driver.probe(scan.gpus[0].uuid)
    stub = nvml_stub.NvmlStub(library)
    stub.set(0, used=3 << 30, reserved=1 << 30)

    assert (4096, 0) == (
        (sample := await driver.sample(scan.gpus[0].uuid)).used_mib,
        sample.reserved_mib,
    )
    assert [0, 0] == [link.nvlinks for link in scan.gpus[0].links]
    assert ProbeOutcome.PASSED is probe.outcome
    assert (None, None) == (probe.signs.rows_failed, probe.signs.recovery)
    await driver.close()


async def test_an_event_of_any_wanted_kind_arrives_with_its_gpu(driver, stub):
    assert DriverEvent(EventKind.XID, UUIDS[2], 94) == await hears(driver, lambda: stub.xid(2, 94))
    kinds = {0x2: EventKind.ECC_DOUBLE, 0x100: EventKind.CHANGED}
    for gpu, (bit, kind) in enumerate(kinds.items()):
        assert DriverEvent(kind, UUIDS[gpu]) == await hears(driver, partial(stub.event, gpu, bit))
    await until(lambda: stub.sets == 0)


# The library file and the sessions with it: found, begun, ended and replaced, around nobody.


MISMATCH = 18


def two_versions(built: Path, folder: Path) -> tuple[NvmlStub, NvmlStub, Path]:
    """An older and a newer library of a driver, and the soname's link, to the older one."""
    old, new = (
        NvmlStub(Path(shutil.copy(built, folder / f"libnvidia-ml.so.{version}")))
        for version in ("570.1", "575.2")
    )
    new.version("575.2")
    link = folder / "libnvidia-ml.so.1"
    link.symlink_to(old.path.name)
    return old, new, link


@pytest.mark.parametrize(
    "place",
    [
        "usr/lib64",
        "lib/aarch64-linux-gnu",
        "usr/lib/x86_64-linux-gnu/nvidia/current",
        "usr/lib",
        "usr/local/glibc/usr/lib",
        "run/opengl-driver/lib",
    ],
)
async def test_the_library_of_a_mounted_host_is_found(built, tmp_path, place):
    below = tmp_path / "root" / place / "libnvidia-ml.so.1"
    below.parent.mkdir(parents=True)
    shutil.copy(built, below)
    driver = NvmlDriver(driver_root=tmp_path / "root", sys_root=tmp_path)

    assert "999.1" == (await driver.scan()).driver_version
    await driver.close()


@pytest.mark.parametrize("by", ["the path", "the host's root"])
async def test_a_library_that_a_package_replaced_is_told_until_the_module_follows(
    built, tmp_path, by
):
    folder = tmp_path / "usr/lib64"
    folder.mkdir(parents=True)
    old, new, link = two_versions(built, folder)
    where = {"path": link} if by == "the path" else {"driver_root": tmp_path}
    driver = NvmlDriver(sys_root=tmp_path, **where)
    driver.check()
    await driver.scan()
    driver.check()

    link.unlink()
    driver.check()  # in the middle of the package's work
    link.symlink_to(new.path.name)
    with pytest.raises(DriverMissing, match=r"replaced by .*575\.2.*reboot"):
        driver.check()
    assert "999.1" == (await driver.scan()).driver_version
    old.fail("any", code=MISMATCH)
    with pytest.raises(DriverMissing, match="restart the agent"):
        await driver.scan()
    with pytest.raises(DriverMissing, match="restart the agent"):
        await driver.scan()
    assert 0 == new.calls("nvmlInitWithFlags")
    await driver.close()


@pytest.mark.parametrize(
    ("left", "link", "other"),
    [
        ([], None, None),
        (["570.1"], None, None),
        (["1"], None, "1"),
        (["1", "570.1"], None, "1"),
        (["575.2"], None, None),
        (["570.1"], "570.1", None),
        (["570.1", "575.2"], "575.2", "575.2"),
        (["575.2"], "575.2", "575.2"),
    ],
)
def test_a_library_that_the_loader_found_is_replaced_by_what_its_link_names(
    tmp_path, left, link, other
):
    for version in left:
        (tmp_path / f"libnvidia-ml.so.{version}").touch()
    if link is not None:
        (tmp_path / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{link}")
    maps = tmp_path / "maps"
    maps.write_text(
        f"7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libc.so.6\n7f01-7f02 rw-p 0 00:00 0 [heap]\n"
        f"7f02-7f03 r-xp 00000000 08:01 2 {tmp_path}/libnvidia-ml.so.570.1 (deleted)\n"
    )
    by_soname = SimpleNamespace(nvmlLib=SimpleNamespace(_name="libnvidia-ml.so.1"))
    named = other and tmp_path / f"libnvidia-ml.so.{other}"

    assert named == successor(by_soname, None, maps)
    for path in (None, tmp_path):
        assert successor(by_soname, path, tmp_path / "none") is None


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF\x01" + bytes(100), b"#!/bin/sh"])
def test_a_library_that_the_loader_does_not_take_is_not_called_missing(
    tmp_path, monkeypatch, content
):
    (tmp_path / "libnvidia-ml.so.1").write_bytes(content)
    monkeypatch.setattr(nvml, "library_below", lambda _: None)
    monkeypatch.setattr(nvml, "SONAME", str(tmp_path / "libnvidia-ml.so.1"))

    assert "cannot be loaded" in str(nvml.missing(pynvml, pynvml.NVMLError(12), tmp_path))


@pytest.mark.parametrize("has_module", [True, False])
async def test_without_device_files_the_module_is_not_called_missing(
    built, tmp_path, has_module, monkeypatch
):
    file = Path(shutil.copy(built, tmp_path / "libnvidia-ml.so.1"))
    NvmlStub(file).fail("any", code=9)
    if has_module:
        (tmp_path / "module/nvidia").mkdir(parents=True)
    driver = NvmlDriver(path=file, sys_root=tmp_path)

    expected = "no device file" if has_module else "module is not loaded"
    with pytest.raises(DriverMissing, match=expected):
        await driver.scan()
    await driver.close()


async def test_a_gpu_whose_device_file_the_agent_may_not_open_is_told_by_its_address(
    driver, stub, tmp_path
):
    bound = tmp_path / "bus/pci/drivers/nvidia"
    bound.mkdir(parents=True)
    first = await driver.scan()
    assert () == first.faults
    for name in (*(gpu.pci for gpu in first.gpus), "module", "bind", "new_id"):
        (bound / name).touch()
    assert () == (await driver.scan()).faults

    (bound / "0000:c1:00.0").touch()
    (fault,) = (await driver.scan()).faults
    assert ("0000:c1:00.0", Trouble.UNLISTED) == (fault.gpu, fault.trouble)
    assert "restart the agent's pod" in fault.remedy
    stub.order([1, 2])  # a GPU that was there before and is not listed now is no new one
    assert ["0000:c1:00.0"] == [fault.gpu for fault in (await driver.scan()).faults]


@pytest.mark.parametrize("missing", [1, 0.1, 0.5, 0.9])
async def test_a_library_without_its_end_is_refused_and_kills_no_process(built, tmp_path, missing):
    content = built.read_bytes()
    file = tmp_path / "libnvidia-ml.so.1"
    file.write_bytes(content[: -(missing if missing == 1 else round(missing * len(content)))])
    driver = NvmlDriver(path=file, sys_root=tmp_path)

    with pytest.raises(DriverMissing, match=r"cannot be loaded .*\(its end is missing\)"):
        await driver.scan()
    await driver.close()


@pytest.mark.parametrize("before", ["", "not a library"])
async def test_a_file_that_is_no_library_is_named_and_one_that_appears_later_is_used(
    built, tmp_path, before
):
    file = tmp_path / "libnvidia-ml.so.1"
    if before:
        file.write_text(before)
    driver = NvmlDriver(path=file, sys_root=tmp_path)
    with pytest.raises(DriverMissing, match=r"libnvidia-ml\.so\.1 cannot be loaded"):
        await driver.scan()
    file.unlink(missing_ok=True)
    shutil.copy(built, file)

    assert 3 == len((await driver.scan()).gpus)
    await driver.close()
