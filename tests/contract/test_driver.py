"""The Driver port: one body over simulated hardware, over NVML with a fake, and with a C stub."""

import asyncio
import ctypes
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

import pynvml
import pytest

from agent.core.errors import DriverError
from agent.core.events import DriverEvent, EventKind, ProbeOutcome
from agent.core.gpu import GpuUuid
from agent.core.ports import Driver
from agent.host.nvml.driver import NvmlDriver
from agent.host.nvml.library import pynvml as the_library
from agent.sandbox import hardware_talk as talk
from agent.sandbox.driver import open_simulation
from agent.sandbox.hardware_client import ask
from tests.fakes import nvml_stub
from tests.fakes.nvml import FakeGpu, FakeNvml

pytestmark = pytest.mark.looptime(False)


@dataclass
class Subject:
    """A driver of three GPUs, and how a test makes things happen to them."""

    driver: Driver
    xid: Callable
    lose: Callable


@pytest.fixture(scope="module")
def stub_path(tmp_path_factory) -> Path:
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


async def simulated(tmp_path: Path):
    path = tmp_path / "simulate.sock"

    async def xid(index: int, number: int) -> None:
        await ask(path, talk.XidRequest(gpu=str(index), xid=number))

    async def lose(index: int) -> None:
        await ask(path, talk.LoseRequest(gpu=str(index)))

    async with open_simulation("t4:3", socket_path=path) as driver:
        yield Subject(driver, xid, lose)


async def faked(tmp_path: Path):
    library = FakeNvml([FakeGpu(f"GPU-{n}", minor=n) for n in range(3)])

    async def xid(index: int, number: int) -> None:
        library.xid(index, number)

    async def lose(index: int) -> None:
        library.failures["*", index] = 15

    driver = NvmlDriver(library, sys_root=tmp_path)
    yield Subject(driver, xid, lose)
    await driver.close()


async def stubbed(tmp_path: Path, stub_path: Path):
    stub = ctypes.CDLL(str(stub_path))

    async def xid(index: int, number: int) -> None:
        stub.stub_xid(index, ctypes.c_ulonglong(number))

    async def lose(index: int) -> None:
        stub.stub_lose(index, 1)

    driver = NvmlDriver(the_library(), path=stub_path, sys_root=tmp_path)
    yield Subject(driver, xid, lose)
    await driver.close()
    assert (0, 0) == (stub.stub_sessions(), stub.stub_sets())
    for index in range(3):
        stub.stub_lose(index, 0)
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.fixture(params=["simulated", "fake", "stub"])
async def subject(request, tmp_path):
    if request.param == "simulated":
        made = simulated(tmp_path)
    elif request.param == "fake":
        made = faked(tmp_path)
    else:
        made = stubbed(tmp_path, request.getfixturevalue("stub_path"))
    async for one in made:
        yield one


async def first(driver: Driver, cause: Callable) -> DriverEvent:
    """The first event; `cause` is repeated until the stream listens and has heard it."""
    events = driver.events()
    assert isinstance(events, AsyncGenerator)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        heard = tasks.create_task(events.__anext__())
        while not heard.done():
            await cause()
            await asyncio.wait([heard], timeout=0.02)
    await events.aclose()
    return heard.result()


async def test_a_scan_lists_the_gpus_by_index(subject):
    scan = await subject.driver.scan()

    assert [0, 1, 2] == [gpu.index for gpu in scan.gpus]
    assert [0, 1, 2] == [gpu.minor for gpu in scan.gpus]
    assert 3 == len({gpu.uuid for gpu in scan.gpus})
    assert all(gpu.name and gpu.pci and not gpu.mig_enabled for gpu in scan.gpus)
    assert [2, 2, 2] == [len(gpu.links) for gpu in scan.gpus]
    assert scan.driver_version[0].isdigit()
    assert scan == await subject.driver.scan()


async def test_a_sound_gpu_passes_its_probe_and_a_stranger_is_lost(subject):
    uuid = (await subject.driver.scan()).gpus[1].uuid

    assert ProbeOutcome.PASSED is (await subject.driver.probe(uuid)).outcome
    assert ProbeOutcome.LOST is (await subject.driver.probe(GpuUuid("GPU-nobody"))).outcome


async def test_a_lost_gpu_is_a_fault_by_its_uuid_and_its_probe_says_lost(subject):
    uuid = (await subject.driver.scan()).gpus[1].uuid
    await subject.lose(1)
    scan = await subject.driver.scan()
    probe = await subject.driver.probe(uuid)

    assert [0, 2] == [gpu.index for gpu in scan.gpus]
    assert [(uuid, True)] == [(fault.gpu, fault.lost) for fault in scan.faults]
    assert (uuid, ProbeOutcome.LOST) == (probe.uuid, probe.outcome)
    assert probe.text


async def test_an_xid_arrives_with_its_gpu(subject):
    uuid = (await subject.driver.scan()).gpus[2].uuid
    event = await first(subject.driver, lambda: subject.xid(2, 94))

    assert DriverEvent(EventKind.XID, uuid, 94) == event


async def test_a_closed_driver_answers_no_more(subject):
    await subject.driver.scan()
    await subject.driver.close()
    await subject.driver.close()

    with pytest.raises(DriverError, match="closed"):
        await subject.driver.scan()
    with pytest.raises(DriverError, match="closed"):
        await subject.driver.probe(GpuUuid("GPU-0"))
    with pytest.raises(DriverError, match="closed"):
        await anext(subject.driver.events())
