"""Random lives of a driver: whatever it does, errors are ours, the sound answer, all comes back."""

import asyncio
import contextlib
import threading

import pytest

from agent.errors import AgentError, DriverError
from agent.gpu import driver as nvml_driver
from agent.gpu.driver import NvmlDriver
from agent.model import GpuUuid, ProbeOutcome
from tests.fakes import nvml_stub
from tests.fakes.chance import Seeded
from tests.fakes.nvml_stub import ANY

pytestmark = [pytest.mark.looptime(False), pytest.mark.timeout(120)]

GPUS, STEPS, DEADLINE = 8, 100, 0.05
UUIDS = [GpuUuid(f"GPU-5708-{slot}") for slot in range(GPUS)]
QUIET = (0, 1)
"""GPUs to which nothing is done."""
ABOUT = "HandleByIndex_v2 HandleByUUID UUID Name MemoryInfo RemappedRows FieldValues"
CALLS = (
    *(ANY, "nvmlDeviceGetUtilizationRates", "nvmlDeviceRegisterEvents"),
    *(f"nvmlDeviceGet{name}" for name in ABOUT.split()),
)
WHOLE = (
    *(ANY, "nvmlInitWithFlags", "nvmlDeviceGetCount_v2"),
    *("nvmlEventSetCreate", "nvmlEventSetWait_v2"),
)
GPU_CODES = (3, 4, 6, 13, 15, 16, 28, 999)
WHOLE_CODES = (9, 18, 999)


class NvmlLife:
    """What happens to one driver, by chance."""

    def __init__(self, stub, chance):
        self.stub, self.chance, self.is_broken = stub, chance, False

    def step(self):
        """Something happens, or something ends."""
        chance, stub = self.chance, self.stub
        slot, call = chance.randrange(len(QUIET), GPUS), chance.choice(CALLS)
        acts = [
            lambda: stub.fail(call, slot, code=chance.choice((*GPU_CODES, 0, 0))),
            lambda: stub.hang(call, slot, hung=chance.random() < 0.5),
            lambda: stub.xid(slot, chance.choice((13, 48, 79))),
            lambda: self.mend(CALLS, slot),
            self.reorder,
        ]
        if chance.random() < 0.1:
            acts = [self.break_whole, stub.end]
        elif chance.random() < 0.3:
            acts = [self.mend_whole]
        chance.choice(acts)()

    def reorder(self):
        there = self.chance.sample(range(len(QUIET), GPUS), self.chance.randrange(GPUS - 2))
        self.stub.order([*QUIET, *there])

    def break_whole(self):
        call, self.is_broken = self.chance.choice(WHOLE), True
        if self.chance.random() < 0.5:
            self.stub.hang(call)
        else:
            self.stub.fail(call, code=self.chance.choice(WHOLE_CODES))

    def mend(self, calls, slot=None):
        for call in calls:
            self.stub.fail(call, slot, code=0)
            self.stub.hang(call, slot, hung=False)

    def mend_whole(self):
        self.mend(WHOLE)
        self.is_broken = False

    def mend_all(self):
        self.mend_whole()
        for slot in range(GPUS):
            self.mend(CALLS, slot)
            self.stub.set(slot, event_types=0x9F, memory=16 << 30)
        self.stub.order(range(GPUS))


async def listen(driver):
    """For ever, as a service does."""
    while True:
        with contextlib.suppress(DriverError):
            async for _ in driver.events():
                pass
        await asyncio.sleep(0.05)


async def ask(question, *about):
    """The answer, or the error of ours that came in its place. Any other fails the test."""
    try:
        return await question(*about)
    except AgentError as error:
        return error


async def until_sound(driver, uuids):
    """These GPUs are there, answer and report: a thread that is back must only be noticed."""
    async with asyncio.timeout(30):
        while True:
            there = {gpu.uuid for gpu in getattr(await ask(driver.scan), "gpus", ())}
            probes = [await ask(driver.probe, uuid) for uuid in uuids]
            found = [
                (getattr(probe, "outcome", None), getattr(probe, "unmonitored", ""))
                for probe in probes
            ]
            if there >= set(uuids) and {*found} == {(ProbeOutcome.PASSED, "")}:
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_errors_are_ours_and_all_comes_back(
    stub, stub_path, tmp_path, monkeypatch, seed
):
    monkeypatch.setattr(nvml_driver, "OPEN_DEADLINE", 2 * DEADLINE)
    life = NvmlLife(stub, Seeded(seed))
    life.mend_all()
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    driver = NvmlDriver(path=stub_path, sys_root=tmp_path, deadline=DEADLINE)
    questions = [
        (driver.scan,),
        *((question, uuid) for question in (driver.probe, driver.sample) for uuid in UUIDS),
    ]
    try:
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(listen(driver))
            for _ in range(STEPS):
                life.step()
                async with asyncio.TaskGroup() as asked:
                    for question in questions:
                        asked.create_task(ask(*question))
                if not life.is_broken and not stub.inside:
                    await until_sound(driver, UUIDS[: len(QUIET)])
                assert len(set(threading.enumerate()) - before) <= 2 * GPUS + 8
            life.mend_all()
            await until_sound(driver, UUIDS)
            # One thread for calls is enough again, and one for events.
            await nvml_stub.until(lambda: len(set(threading.enumerate()) - before) <= 2)
            listening.cancel()
    finally:
        life.mend_all()
        await driver.close()
        nvml_stub.forget()
    assert (0, 0, 0, 0) == (stub.sessions, stub.sets, stub.inside, stub.undefined)
