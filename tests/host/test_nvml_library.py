"""The driver's library file: found, replaced, broken or refused."""

import _ctypes
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from agent.errors import DriverMissing
from agent.gpu import nvml
from agent.gpu.driver import NvmlDriver
from agent.gpu.nvml import successor
from agent.model import Trouble
from tests.fakes.nvml_stub import NvmlStub

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

MISMATCH = 18


PLACES = (
    "usr/lib64 lib/aarch64-linux-gnu usr/lib/x86_64-linux-gnu/nvidia/current usr/lib "
    "usr/local/glibc/usr/lib run/opengl-driver/lib"
)


@pytest.mark.parametrize("place", PLACES.split())
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
    old, new = (
        NvmlStub(Path(shutil.copy(built, folder / f"libnvidia-ml.so.{version}")))
        for version in ("570.1", "575.2")
    )
    new.version("575.2")
    link = folder / "libnvidia-ml.so.1"
    link.symlink_to(old.path.name)
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
    for _ in range(2):
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
    file = tmp_path / "libnvidia-ml.so.1"
    file.write_bytes(content)
    monkeypatch.setattr(nvml, "library_below", lambda _: None)
    monkeypatch.setattr(nvml, "SONAME", str(file))

    assert "cannot be loaded" in str(nvml.missing(pynvml, pynvml.NVMLError(12), tmp_path))


@pytest.mark.parametrize(
    ("has_module", "said"), [(True, "no device file"), (False, "module is not loaded")]
)
async def test_without_device_files_the_module_is_not_called_missing(
    driver, stub, tmp_path, has_module, said
):
    stub.fail("any", code=9)
    if has_module:
        (tmp_path / "module/nvidia").mkdir(parents=True)

    with pytest.raises(DriverMissing, match=said):
        await driver.scan()


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


WHOLE = Path(_ctypes.__file__).read_bytes()
"""Any library."""
END = r"its end is missing\)"


def cut(share: float, file: Path, stub: bytes) -> None:
    """So much of the library."""
    file.write_bytes(stub[: round(share * len(stub))])


NO_LIBRARY = {
    "nothing": (lambda file, _: None, ""),
    "a text": (lambda file, _: file.write_text("not a library"), ""),
    "a loop": (lambda file, _: file.symlink_to(file.name), ""),
    "another": (lambda file, _: file.write_bytes(WHOLE), r"it has no function nvmlInit_v2\)"),
    "of RISC-V": (
        lambda file, _: file.write_bytes(WHOLE[:18] + b"\xf3\x00" + WHOLE[20:]),
        r"it is built for another architecture\)",
    ),
    **{f"{share:.2%} of one": (partial(cut, share), END) for share in (0.1, 0.5, 0.9, 0.9999)},
}


@pytest.mark.parametrize(("make", "words"), NO_LIBRARY.values(), ids=NO_LIBRARY)
async def test_a_file_that_is_no_whole_library_kills_no_process_and_a_good_one_is_used_later(
    built, tmp_path, make, words
):
    file = tmp_path / "libnvidia-ml.so.1"
    make(file, built.read_bytes())
    driver = NvmlDriver(path=file, sys_root=tmp_path)
    with pytest.raises(DriverMissing, match=rf"libnvidia-ml\.so\.1 cannot be loaded.*{words}"):
        await driver.scan()
    file.unlink(missing_ok=True)
    shutil.copy(built, file)

    assert "no function" in words or 3 == len((await driver.scan()).gpus)
    await driver.close()
