"""Probes, signs and samples through NVML: one GPU's silence or failure is never another's."""

import asyncio

import pytest

from agent.errors import DriverError, GpuError
from agent.gpu.driver import NvmlDriver
from agent.model import GpuUuid, ProbeOutcome, RecoveryAction
from tests.fakes.nvml_stub import ANY, until

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

G0, G1 = GpuUuid("GPU-5708-0"), GpuUuid("GPU-5708-1")


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
async def test_a_probe_says_how_the_gpu_answers(driver, stub, call, code, outcome):
    stub.fail(call, 1, code=code)

    assert (ProbeOutcome.PASSED, outcome) == (
        (await driver.probe(G0)).outcome,
        (await driver.probe(G1)).outcome,
    )


async def test_a_late_answer_of_a_session_that_is_over_does_not_end_the_next(
    stub, stub_path, tmp_path
):
    driver = NvmlDriver(path=stub_path, sys_root=tmp_path, deadline=5)
    await driver.probe(G0)
    stub.fail("nvmlDeviceGetHandleByUUID", code=1)
    stub.hang("nvmlDeviceGetHandleByUUID", 1)

    async def late() -> None:
        with pytest.raises(DriverError, match="session"):
            await driver.probe(G1)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(late())
        await until(lambda: stub.inside == 1)
        with pytest.raises(DriverError, match="session"):
            await driver.probe(G0)
        stub.fail("nvmlDeviceGetHandleByUUID", code=0)
        stub.fail("nvmlDeviceGetHandleByUUID", 1, code=1)
        next_one = tasks.create_task(driver.probe(G0))
        stub.release()

    assert ProbeOutcome.PASSED is next_one.result().outcome
    assert ProbeOutcome.PASSED is (await driver.probe(G0)).outcome
    assert 2 == stub.calls("nvmlInitWithFlags")
    await driver.close()


SIDE_QUESTIONS = {
    "nvmlDeviceGetRemappedRows": ("rows_pending", "rows_failed"),
    "nvmlDeviceGetRetiredPagesPendingStatus": ("pages_pending",),
    "nvmlDeviceGetFieldValues": ("recovery",),
}


@pytest.mark.parametrize(
    ("number", "action"),
    [
        (0, RecoveryAction.NONE),
        (1, RecoveryAction.GPU_RESET),
        (2, RecoveryAction.NODE_REBOOT),
        (3, RecoveryAction.DRAIN_P2P),
        (4, RecoveryAction.DRAIN_AND_RESET),
        (7, RecoveryAction.SYSTEM_REBOOT),
        (99, RecoveryAction.OTHER),
        (None, None),
    ],
)
async def test_the_drivers_advice_is_named_and_an_unknown_one_is_not_none(
    driver, stub, number, action
):
    stub.set(0, recovery=-1 if number is None else number)

    assert action == (await driver.probe(G0)).signs.recovery


GONE = {15: ProbeOutcome.LOST, 16: ProbeOutcome.REFUSED}


@pytest.mark.parametrize("code", [2, 3, 4, 13, 999, *GONE])
@pytest.mark.parametrize("call", SIDE_QUESTIONS)
async def test_a_side_question_fails_a_probe_only_if_the_gpu_is_gone(driver, stub, call, code):
    stub.fail(call, 0, code=code)
    probe = await driver.probe(G0)

    assert GONE.get(code, ProbeOutcome.PASSED) is probe.outcome
    assert ProbeOutcome.PASSED is (await driver.probe(G1)).outcome
    if code in GONE:
        return
    assert {None} == {getattr(probe.signs, name) for name in SIDE_QUESTIONS[call]}
    others = set(sum(SIDE_QUESTIONS.values(), ())) - {*SIDE_QUESTIONS[call]}
    assert None not in {getattr(probe.signs, name) for name in others}


async def test_a_gpu_that_does_not_answer_is_named_and_the_other_answers(driver, stub):
    stub.hang(ANY, 0)
    with pytest.raises(GpuError, match="GPU GPU-5708-0: no answer in time") as caught:
        await driver.sample(G0)
    assert not caught.value.lost
    with pytest.raises(GpuError, match="an earlier call about GPU-5708-0 has not returned"):
        await driver.sample(G0)
    probe = await driver.probe(G0)

    assert (ProbeOutcome.SILENT, True) == (probe.outcome, "has not returned" in probe.text)
    assert ProbeOutcome.PASSED is (await driver.probe(G1)).outcome
    assert (await driver.sample(G1)) is not None


@pytest.mark.parametrize(("code", "lost"), [(15, True), (28, True), (999, False)])
async def test_an_error_of_one_gpu_is_ours_and_names_it(driver, stub, code, lost):
    stub.fail("nvmlDeviceGetHandleByUUID", 0, code=code)
    with pytest.raises(GpuError, match="GPU GPU-5708-0: ") as caught:
        await driver.sample(G0)

    assert ("GPU-5708-0", lost) == (caught.value.gpu, caught.value.lost)
