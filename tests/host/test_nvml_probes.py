"""Probes through NVML: one GPU's silence, loss or failure is never another's."""

import asyncio
import threading

import pytest

from agent.errors import DriverError
from agent.gpu.driver import NvmlDriver
from agent.model import GpuUuid, ProbeOutcome
from tests.fakes.nvml import until

pytestmark = pytest.mark.looptime(False)

G0, G1 = GpuUuid("GPU-0"), GpuUuid("GPU-1")


@pytest.fixture
def deadline() -> float:
    """Long enough for whoever answers on a busy machine."""
    return 1.5


@pytest.mark.parametrize(
    ("call", "code", "outcome"),
    [
        ("nvmlDeviceGetMemoryInfo", 15, ProbeOutcome.LOST),
        ("nvmlDeviceGetHandleByUUID", 28, ProbeOutcome.LOST),
        ("nvmlDeviceGetMemoryInfo", 999, ProbeOutcome.FAILED),
        ("nvmlDeviceGetMemoryInfo", 16, ProbeOutcome.REFUSED),
        ("nvmlDeviceGetMemoryInfo", 3, ProbeOutcome.PASSED),
        ("nvmlDeviceGetRemappedRows", 13, ProbeOutcome.PASSED),
    ],
)
async def test_a_probe_says_how_the_gpu_answers(driver, library, call, code, outcome):
    library.failures[call, 1] = code

    assert (ProbeOutcome.PASSED, outcome) == (
        (await driver.probe(G0)).outcome,
        (await driver.probe(G1)).outcome,
    )


async def test_gpus_that_answer_share_a_thread_with_the_driver(driver):
    before = set(threading.enumerate())
    await driver.scan()
    for n in range(3):
        await driver.probe(GpuUuid(f"GPU-{n}"))

    # A slow machine may have needed more of them for a while.
    await until(lambda: len(set(threading.enumerate()) - before) == 1)


async def test_a_gpu_that_is_not_there_is_lost(driver):
    assert ProbeOutcome.LOST is (await driver.probe(GpuUuid("GPU-none"))).outcome


async def test_a_row_that_could_not_be_remapped_fails_the_probe(driver, library):
    library.gpus[0].rows_failed = 1
    probe = await driver.probe(G0)

    assert ProbeOutcome.FAILED is probe.outcome
    assert "remapped" in probe.text


async def test_a_gpu_that_does_not_answer_is_silent_and_the_others_are_not(driver, library):
    library.hanging.add(("*", 1))

    assert ProbeOutcome.SILENT is (await driver.probe(G1)).outcome
    assert ProbeOutcome.PASSED is (await driver.probe(G0)).outcome
    assert "has not returned" in (await driver.probe(G1)).text


async def test_a_probe_behind_a_sample_that_answers_in_time_has_its_own_time(driver, library):
    await driver.probe(G1)
    slow, handle_of = threading.Event(), library.nvmlDeviceGetHandleByUUID

    def handle_slowly(uuid: str) -> object:
        slow.wait(1.0)  # two of them are more than the deadline
        return handle_of(uuid)

    library.nvmlDeviceGetHandleByUUID = handle_slowly
    async with asyncio.TaskGroup() as tasks:
        sample = tasks.create_task(driver.sample(G1))
        probe = tasks.create_task(driver.probe(G1))

    assert (G1, ProbeOutcome.PASSED) == (sample.result().uuid, probe.result().outcome)


async def test_a_probe_of_a_driver_that_is_gone_says_so(driver, library):
    await driver.probe(G0)
    library.failures["nvmlDeviceGetHandleByUUID", None] = 9
    with pytest.raises(DriverError, match="kernel module is not loaded"):
        await driver.probe(G0)


async def test_a_late_answer_of_a_session_that_is_over_does_not_end_the_next(library, tmp_path):
    driver = NvmlDriver(library, sys_root=tmp_path, deadline=5)
    await driver.probe(G0)
    library.failures["nvmlDeviceGetHandleByUUID", None] = 1
    library.hanging.add(("nvmlDeviceGetHandleByUUID", 1))

    async def late() -> None:
        with pytest.raises(DriverError, match="session"):
            await driver.probe(G1)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(late())
        await until(lambda: library.inside == 1)
        with pytest.raises(DriverError, match="session"):
            await driver.probe(G0)
        del library.failures["nvmlDeviceGetHandleByUUID", None]
        library.failures["nvmlDeviceGetHandleByUUID", 1] = 1
        next_one = tasks.create_task(driver.probe(G0))
        library.release()

    assert ProbeOutcome.PASSED is next_one.result().outcome
    assert ProbeOutcome.PASSED is (await driver.probe(G0)).outcome
    assert 2 == library.calls["nvmlInit"]
    await driver.close()
