"""The driver's library file: found, replaced, broken or refused; and its events."""

import _ctypes
import asyncio
import contextlib
import shutil
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from agent.errors import DriverError, DriverMissing
from agent.gpu import driver as nvml_driver
from agent.gpu import nvml
from agent.gpu.driver import NvmlDriver
from agent.gpu.nvml import successor
from agent.model import DriverEvent, EventKind, GpuUuid, ProbeOutcome, Trouble
from tests.fakes.nvml_stub import NvmlStub, hear, listening, until

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

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


# Events: whose they are, who cannot report, storms, and threads that hang.


G0, G1, G2 = (GpuUuid(f"GPU-5708-{slot}") for slot in range(3))


@contextlib.asynccontextmanager
async def open_stream(driver, stub):
    """What a listener hears once its stream is open, as events of the last GPU have shown."""
    async with listening(driver) as heard:
        while heard.empty():
            stub.xid(2, 13)
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        while not heard.empty():
            heard.get_nowait()
        yield heard


async def test_an_event_of_any_wanted_kind_arrives_with_its_gpu(driver, stub):
    async with open_stream(driver, stub) as heard:
        await driver.scan()
        assert 3 == stub.calls("nvmlDeviceRegisterEvents")
        for slot, gpu, kind, bit, xid in (
            (2, G2, EventKind.XID, 0x8, 94),
            (0, G0, EventKind.ECC_DOUBLE, 0x2, None),
            (1, G1, EventKind.CHANGED, 0x100, None),
        ):
            stub.event(slot, bit, xid or 0)
            assert [DriverEvent(kind, gpu, xid)] == await hear(heard, 1)
    await until(lambda: stub.sets == 0)


@pytest.mark.parametrize(
    ("types", "call", "code", "words"),
    [
        (2, "", 0, "does not report XIDs"),
        (16, "", 0, "does not report XIDs"),
        (8, "nvmlDeviceGetSupportedEventTypes", 3, "no events: Not Supported"),
        (8, "nvmlDeviceRegisterEvents", 999, "Unknown Error"),
    ],
)
async def test_a_probe_says_that_a_gpu_is_unmonitored_and_why(
    driver, stub, types, call, code, words
):
    stub.set(0, event_types=types)
    if call:
        stub.fail(call, 0, code=code)
    await driver.scan()
    async with open_stream(driver, stub):
        probes = [await driver.probe(G0), await driver.probe(G1)]
        stub.succeed()
        await driver.scan()
        after = (await driver.probe(G0)).unmonitored

    assert words in probes[0].unmonitored
    assert [ProbeOutcome.PASSED] * 2 == [probe.outcome for probe in probes]
    assert "" == probes[1].unmonitored
    # A registration that failed may succeed at the next scan; nobody listens any more at the end.
    assert code != 999 or after == ""
    assert "" == (await driver.probe(G0)).unmonitored


async def test_a_thread_that_dies_is_an_error_and_no_silence(driver, stub, monkeypatch):
    async with open_stream(driver, stub) as heard:
        monkeypatch.setattr(pynvml, "nvmlEventSetWait_v2", len)  # whatever it may stumble over
        (error,) = await hear(heard, 1)

    assert isinstance(error, DriverError)
    assert "has died" in str(error)
    await until(lambda: not stub.sets)


async def test_no_second_thread_is_sent_into_a_wait_that_does_not_come_back(
    driver, stub, monkeypatch
):
    monkeypatch.setattr(nvml_driver, "STALL", 0.1)
    monkeypatch.setattr(nvml_driver, "FAREWELL", 0.1)
    before = set(threading.enumerate())

    async def listen() -> str:
        with pytest.raises(DriverError) as caught:
            await anext(driver.events())
        return str(caught.value)

    stub.hang("nvmlEventSetWait_v2")
    said = [await listen() for _ in range(2)]

    waiting = {one for one in threading.enumerate() if one.name == "nvml-events"} - before
    assert 1 == len(waiting)
    assert "an earlier wait for events has not returned" in said[1]
    stub.release()
    await until(lambda: not any(one.is_alive() for one in waiting))
    async with open_stream(driver, stub):
        pass


@pytest.mark.parametrize("code", [15, 999])
async def test_a_wait_that_fails_is_an_error_and_the_next_stream_has_another_set(
    driver, stub, code
):
    async with open_stream(driver, stub) as heard:
        stub.fail("nvmlEventSetWait_v2", code=code)
        (error,) = await hear(heard, 1)
        stub.succeed()
        told = error
        while isinstance(told, DriverError):
            stub.xid(0, 31)
            await asyncio.sleep(0.02)
            told = told if heard.empty() else heard.get_nowait()

    assert "waiting for events failed" in str(error)
    assert DriverEvent(EventKind.XID, G0, 31) == told
    assert stub.calls("nvmlEventSetCreate") >= 2


@pytest.mark.parametrize("reason", ["", "Unknown Error"])
async def test_a_gpu_that_was_stuck_is_registered_as_soon_as_it_answers_or_says_the_new_reason(
    driver, stub, reason
):
    await driver.scan()
    stub.hang("nvmlDeviceGetHandleByUUID", 1)
    await driver.probe(G1)
    async with open_stream(driver, stub) as heard:
        assert "has not returned" in (await driver.probe(G1)).unmonitored
        if reason:
            stub.fail("nvmlDeviceRegisterEvents", 1, code=999)
        stub.release()
        assert [DriverEvent(EventKind.CHANGED)] == await hear(heard, 1)

        assert reason == (await driver.probe(G1)).unmonitored


async def test_without_a_thread_that_waits_for_events_the_stream_says_so(driver, monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    await driver.scan()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(DriverError, match="no thread can be started to wait for events"):
            await anext(driver.events())
