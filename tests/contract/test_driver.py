"""The Driver port: one body over simulated hardware, and over NVML with a C stub."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent.errors import DriverError, GpuError
from agent.gpu.driver import NvmlDriver
from agent.model import DriverEvent, EventKind, GpuUuid, Probe, ProbeOutcome, RecoveryAction
from agent.ports import Driver
from agent.sandbox.driver import open_simulation
from agent.sandbox.hardware_talk import HardwareRequest, ask
from tests.contract.real_driver import open_real_driver
from tests.fakes import nvml_stub
from tests.fakes.nvml_stub import NvmlStub, listening

pytestmark = pytest.mark.looptime(False)

NOBODY = GpuUuid("GPU-nobody")


@dataclass
class Subject:
    """A driver of three GPUs, and how a test does things to them: its word, an index, an XID.

    On real hardware nothing is done, and there may be fewer.
    """

    driver: Driver
    do: Callable[..., Awaitable[None]] | None = None
    gpus: int = 3

    async def cause(self, word: str, index: int, *xid: int) -> None:
        assert self.do is not None
        await self.do(word, index, *xid)


@pytest.fixture(scope="module")
def stub_path(tmp_path_factory) -> Path:
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


async def simulated(tmp_path: Path, _: pytest.FixtureRequest):
    path = tmp_path / "simulate.sock"

    async def do(word: str, index: int, xid: int = 0) -> None:
        verb: Any = "restore" if word == "find" else word
        await ask(path, HardwareRequest(verb, str(index), xid))

    async with open_simulation("t4:3", socket_path=path) as driver:
        yield Subject(driver, do)


async def stubbed(tmp_path: Path, request: pytest.FixtureRequest):
    library = tmp_path / "libnvidia-ml.so.1"
    shutil.copy(request.getfixturevalue("stub_path"), library)
    stub = NvmlStub(library)
    there = [0, 1, 2]

    async def do(word: str, index: int, *xid: int) -> None:
        match word:
            case "find":
                stub.lose(there[index], lost=False)
            case "remove":
                del there[index]
                stub.order(there)
            case _:
                getattr(stub, word)(there[index], *xid)

    driver = NvmlDriver(path=library, sys_root=tmp_path)
    yield Subject(driver, do)
    await driver.close()
    assert (0, 0, 0) == (stub.sessions, stub.sets, stub.inside)
    nvml_stub.forget()


async def real(*_: object):
    async with open_real_driver() as (driver, scan):
        yield Subject(driver, gpus=len(scan.gpus))


@pytest.fixture(params=[simulated, stubbed, pytest.param(real, marks=pytest.mark.gpu)])
async def subject(request, tmp_path):
    async for one in request.param(tmp_path, request):
        yield one


@pytest.fixture
def pliable(subject) -> Subject:
    """Hardware that a test can do things to."""
    if subject.do is None:
        pytest.skip("nothing is done to real hardware")
    made: Subject = subject
    return made


async def answering(driver: Driver, uuid: GpuUuid) -> Probe:
    """The first probe that passes: a reset may take a while."""
    async with asyncio.timeout(30):
        while True:
            probe = await driver.probe(uuid)
            if probe.outcome is ProbeOutcome.PASSED:
                return probe
            await asyncio.sleep(0.05)


async def test_a_stream_of_events_says_once_that_it_is_open_and_misses_nothing_from_then_on(
    pliable,
):
    opened = asyncio.Queue[bool]()
    events = pliable.driver.events(lambda: opened.put_nowait(True))
    assert isinstance(events, AsyncGenerator)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        heard = tasks.create_task(events.__anext__())
        assert await opened.get()
        await pliable.cause("xid", 1, 48)
        event = await heard
    await events.aclose()

    assert (EventKind.XID, 48, True) == (event.kind, event.xid, opened.empty())


async def test_a_scan_lists_the_gpus_by_index(subject):
    scan = await subject.driver.scan()

    assert list(range(subject.gpus)) == [gpu.index for gpu in scan.gpus]
    assert subject.gpus == len({gpu.uuid for gpu in scan.gpus})
    assert subject.gpus == len({gpu.minor for gpu in scan.gpus})
    assert all(gpu.name and gpu.pci for gpu in scan.gpus)
    assert {subject.gpus - 1} == {len(gpu.links) for gpu in scan.gpus}
    assert scan.driver_version[0].isdigit()
    assert scan == await subject.driver.scan()
    probe = await subject.driver.probe(scan.gpus[-1].uuid)
    assert (scan.gpus[-1].uuid, ProbeOutcome.PASSED) == (probe.uuid, probe.outcome)


async def test_the_signs_and_a_sample_of_a_sound_gpu_are_well_or_nothing(subject):
    uuid = (await subject.driver.scan()).gpus[0].uuid
    signs, sample = (await subject.driver.probe(uuid)).signs, await subject.driver.sample(uuid)
    assert {signs.rows_pending, signs.rows_failed, signs.pages_pending} <= {None, False}
    assert signs.recovery in {None, RecoveryAction.NONE}
    assert uuid == sample.uuid
    shares = sample.gpu_percent, sample.memory_percent
    assert all(share is None or 0 <= share <= 100 for share in shares)
    assert sample.used_mib is None or sample.used_mib >= 0


async def test_a_stranger_is_lost_and_side_questions_to_him_fail_for_him_alone(subject):
    assert ProbeOutcome.LOST is (await subject.driver.probe(NOBODY)).outcome
    with pytest.raises(GpuError, match="GPU GPU-nobody: ") as caught:
        await subject.driver.sample(NOBODY)
    assert ("GPU-nobody", True) == (caught.value.gpu, caught.value.lost)
    assert subject.gpus == len((await subject.driver.scan()).gpus)


async def test_a_lost_gpu_is_a_fault_by_its_uuid_and_its_probe_says_lost(pliable):
    uuid = (await pliable.driver.scan()).gpus[1].uuid
    await pliable.cause("lose", 1)
    scan = await pliable.driver.scan()
    probe = await pliable.driver.probe(uuid)

    assert [0, 2] == [gpu.index for gpu in scan.gpus]
    assert [(uuid, True)] == [(fault.gpu, fault.lost) for fault in scan.faults]
    assert (uuid, ProbeOutcome.LOST) == (probe.uuid, probe.outcome)
    assert probe.text
    with pytest.raises(GpuError, match=uuid):
        await pliable.driver.sample(uuid)


async def test_a_gpu_that_is_refused_until_a_reset_says_so_and_no_more_after_it(pliable):
    before = await pliable.driver.scan()
    uuid = before.gpus[1].uuid
    await pliable.cause("refuse", 1)
    probe = await pliable.driver.probe(uuid)
    scan = await pliable.driver.scan()

    assert ProbeOutcome.REFUSED is probe.outcome
    assert probe.text
    assert [0, 2] == [gpu.index for gpu in scan.gpus]
    assert [(uuid, False)] == [(fault.gpu, fault.lost) for fault in scan.faults]
    with pytest.raises(GpuError, match=uuid) as caught:
        await pliable.driver.sample(uuid)
    assert not caught.value.lost
    await pliable.cause("find", 1)
    assert ProbeOutcome.PASSED is (await answering(pliable.driver, uuid)).outcome
    assert before == await pliable.driver.scan()


@pytest.mark.parametrize("asked", [["probe"], ["scan"], ["probe", "scan"]])
@pytest.mark.parametrize("trouble", ["lose", "refuse"])
async def test_a_gpu_is_heard_again_after_its_reset(pliable, trouble, asked):
    uuid = (await pliable.driver.scan()).gpus[1].uuid
    async with listening(pliable.driver) as heard:
        while heard.empty():
            await pliable.cause("xid", 0, 94)
            await asyncio.sleep(0.02)
        await pliable.cause(trouble, 1)
        for question in asked:
            await (pliable.driver.scan() if question == "scan" else pliable.driver.probe(uuid))
        await pliable.cause("find", 1)
        assert "" == (await answering(pliable.driver, uuid)).unmonitored
        told = DriverEvent(EventKind.XID, uuid, 48)
        async with asyncio.timeout(30):  # what comes while one set takes another's place is lost
            while heard.empty() or heard.get_nowait() != told:
                await pliable.cause("xid", 1, 48)
                await asyncio.sleep(0.02)


async def test_a_gpu_that_is_taken_out_is_no_fault_and_the_others_keep_their_uuids(pliable):
    before = await pliable.driver.scan()
    await pliable.cause("remove", 1)
    after = await pliable.driver.scan()
    assert () == after.faults
    assert [before.gpus[0].uuid, before.gpus[2].uuid] == [gpu.uuid for gpu in after.gpus]
    assert ProbeOutcome.LOST is (await pliable.driver.probe(before.gpus[1].uuid)).outcome


async def test_a_closed_driver_answers_no_more(subject):
    await subject.driver.scan()
    await subject.driver.close()
    await subject.driver.close()

    with pytest.raises(DriverError, match="closed"):
        await subject.driver.scan()
    for question in (subject.driver.probe, subject.driver.sample):
        with pytest.raises(DriverError, match="closed"):
            await question(NOBODY)
    with pytest.raises(DriverError, match="closed"):
        await anext(subject.driver.events(lambda: pytest.fail("it is closed")))
