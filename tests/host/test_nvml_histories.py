"""Random lives of a driver: whatever it does, errors are ours, the sound answer, all comes back."""

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest

from agent.errors import AgentError, DriverError
from agent.gpu import driver as nvml_driver
from agent.gpu.driver import NvmlDriver
from agent.model import GpuUuid, ProbeOutcome
from tests.fakes import nvml_stub
from tests.fakes.chance import Seeded
from tests.fakes.nvml_stub import ANY, NvmlStub

pytestmark = [pytest.mark.looptime(False), pytest.mark.timeout(120)]

GPUS = 8
STEPS = 100
DEADLINE = 0.05
QUIET = (0, 1)
"""GPUs to which nothing is done."""
CALLS = (
    ANY,
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceRegisterEvents",
)
WHOLE = (
    ANY,
    "nvmlInitWithFlags",
    "nvmlDeviceGetCount_v2",
    "nvmlEventSetCreate",
    "nvmlEventSetWait_v2",
)
GPU_CODES = (3, 4, 6, 13, 15, 16, 28, 999)
WHOLE_CODES = (9, 18, 999)


def uuid(slot: int) -> GpuUuid:
    return GpuUuid(f"GPU-5708-{slot}")


class NvmlLife:
    """What happens to one driver, by chance."""

    def __init__(self, stub: NvmlStub, chance: Seeded) -> None:
        self.stub = stub
        self.chance = chance
        self.whole: set[str] = set()

    def step(self) -> None:
        """Something happens, or something ends."""
        chance = self.chance
        slot = chance.randrange(len(QUIET), GPUS)
        call = chance.choice(CALLS)
        acts: list[Callable[[], None]] = [
            lambda: self.stub.fail(call, slot, code=chance.choice((*GPU_CODES, 0, 0))),
            lambda: self.stub.hang(call, slot, hung=chance.random() < 0.5),
            lambda: self.stub.xid(slot, chance.choice((13, 48, 79))),
            lambda: self.mend(slot),
            self.reorder,
        ]
        if chance.random() < 0.1:
            acts = [self.break_whole, self.stub.end]
        elif chance.random() < 0.3:
            acts = [self.mend_whole]
        chance.choice(acts)()

    def reorder(self) -> None:
        there = self.chance.sample(range(len(QUIET), GPUS), self.chance.randrange(GPUS - 2))
        self.stub.order([*QUIET, *there])

    def break_whole(self) -> None:
        call = self.chance.choice(WHOLE)
        self.whole.add(call)
        if self.chance.random() < 0.5:
            self.stub.hang(call)
        else:
            self.stub.fail(call, code=self.chance.choice(WHOLE_CODES))

    def mend(self, slot: int) -> None:
        for call in CALLS:
            self.stub.fail(call, slot, code=0)
            self.stub.hang(call, slot, hung=False)

    def mend_whole(self) -> None:
        for call in WHOLE:
            self.stub.fail(call, code=0)
            self.stub.hang(call, hung=False)
        self.whole.clear()

    def mend_all(self) -> None:
        self.mend_whole()
        for slot in range(GPUS):
            self.mend(slot)
            self.stub.set(slot, event_types=0x9F, memory=16 << 30)
        self.stub.order(range(GPUS))


async def listen(driver: NvmlDriver) -> None:
    """For ever, as a service does."""
    while True:
        with contextlib.suppress(DriverError):
            async for _ in driver.events():
                pass
        await asyncio.sleep(0.05)


async def ask(question: Callable, *about: object) -> object:
    """The answer, or the error of ours that came in its place."""
    try:
        return await question(*about)
    except AgentError as error:
        return error


async def look(driver: NvmlDriver) -> None:
    """Ask everything at once, as the services do. Any other error fails the test."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(driver.scan))
        for slot in range(GPUS):
            for question in (driver.probe, driver.sample):
                tasks.create_task(ask(question, uuid(slot)))


async def sound(driver: NvmlDriver, slots: Iterable[int]) -> bool:
    """Whether these GPUs are there, answer and report."""
    scan = await ask(driver.scan)
    there = {gpu.uuid for gpu in getattr(scan, "gpus", ())}
    probes = [await ask(driver.probe, uuid(slot)) for slot in slots]
    return there >= {uuid(slot) for slot in slots} and all(
        getattr(probe, "outcome", None) is ProbeOutcome.PASSED
        and not getattr(probe, "unmonitored", "")
        for probe in probes
    )


async def comes(holds: Callable[[], Awaitable[bool]]) -> bool:
    """Whether it came true in time: a thread that is back must only be noticed."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 30
    while not await holds():
        if loop.time() > end:
            return False
        await asyncio.sleep(0.02)
    return True


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_errors_are_ours_and_all_comes_back(
    built, tmp_path, monkeypatch, seed
):
    monkeypatch.setattr(nvml_driver, "OPEN_DEADLINE", 2 * DEADLINE)
    library = Path(shutil.copy(built, tmp_path / "libnvidia-ml.so.1"))
    stub = NvmlStub(library)
    life = NvmlLife(stub, Seeded(seed))
    life.mend_all()
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    driver = NvmlDriver(path=library, sys_root=tmp_path, deadline=DEADLINE)
    try:
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(listen(driver))
            for _ in range(STEPS):
                life.step()
                await look(driver)
                if not life.whole and not stub.inside:
                    assert await comes(lambda: sound(driver, QUIET))
                assert len(set(threading.enumerate()) - before) <= 2 * GPUS + 8
            life.mend_all()
            assert await comes(lambda: sound(driver, range(GPUS)))
            listening.cancel()
    finally:
        life.mend_all()
        await driver.close()
        nvml_stub.forget()
    assert (0, 0, 0, 0) == (stub.sessions, stub.sets, stub.inside, stub.undefined)
