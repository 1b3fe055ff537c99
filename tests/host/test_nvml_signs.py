"""Signs, samples and processes of a known GPU: what cannot be told is None, never a failure."""

import pytest

from agent.errors import GpuError
from agent.model import GpuSample, GpuUuid, ProbeOutcome, RecoveryAction

pytestmark = pytest.mark.looptime(False)

G0, G1 = GpuUuid("GPU-0"), GpuUuid("GPU-1")
SIDE_QUESTIONS = {
    "nvmlDeviceGetRemappedRows": ("rows_pending", "rows_failed", "rows_remapped"),
    "nvmlDeviceGetRetiredPagesPendingStatus": ("pages_pending",),
    "nvmlDeviceGetRetiredPages": ("pages_retired",),
    "nvmlDeviceGetTotalEccErrors": ("ecc_corrected", "ecc_uncorrected"),
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
    driver, library, number, action
):
    library.gpus[0].recovery = number

    assert action == (await driver.probe(G0)).signs.recovery


@pytest.mark.parametrize("code", [2, 3, 4, 13, 999])
@pytest.mark.parametrize("call", SIDE_QUESTIONS)
async def test_a_side_question_that_fails_leaves_its_signs_open_and_fails_no_probe(
    driver, library, call, code
):
    library.failures[call, 0] = code
    probe = await driver.probe(G0)

    assert ProbeOutcome.PASSED is probe.outcome
    assert {None} == {getattr(probe.signs, name) for name in SIDE_QUESTIONS[call]}
    others = set(sum(SIDE_QUESTIONS.values(), ())) - {*SIDE_QUESTIONS[call]}
    assert None not in {getattr(probe.signs, name) for name in others}


@pytest.mark.parametrize(("code", "outcome"), [(15, ProbeOutcome.LOST), (16, ProbeOutcome.REFUSED)])
@pytest.mark.parametrize("call", SIDE_QUESTIONS)
async def test_a_side_question_that_finds_the_gpu_gone_fails_the_probe(
    driver, library, call, code, outcome
):
    library.failures[call, 0] = code
    probe = await driver.probe(G0)

    assert outcome is probe.outcome
    assert ProbeOutcome.PASSED is (await driver.probe(G1)).outcome


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(15, ProbeOutcome.LOST), (16, ProbeOutcome.REFUSED), (3, ProbeOutcome.PASSED)],
)
async def test_an_answer_whose_only_field_finds_the_gpu_gone_fails_the_probe(
    driver, library, code, outcome
):
    library.field_code = code
    probe = await driver.probe(G0)

    assert (outcome, None) == (probe.outcome, probe.signs.recovery)


async def test_a_sample_of_what_cannot_be_told_is_none(driver, library):
    library.failures["nvmlDeviceGetUtilizationRates", 0] = 3
    library.failures["nvmlDeviceGetMemoryInfo", 0] = 3

    assert GpuSample(G0) == await driver.sample(G0)


async def test_a_sample_has_heat_power_and_the_errors_of_a_life(driver, library):
    library.gpus[1].celsius, library.gpus[1].milliwatts = 41, 70_150
    library.gpus[1].ecc, library.gpus[1].ecc_life = (1, 0), (9, 2)
    library.failures["nvmlDeviceGetTemperature", 0] = 999

    sample = await driver.sample(G1)
    assert (41, 70_150) == (sample.celsius, sample.milliwatts)
    assert (9, 2) == (sample.ecc_corrected, sample.ecc_uncorrected)
    assert (await driver.sample(G0)).celsius is None


async def test_a_sample_that_may_not_be_seen_is_none_and_the_session_goes_on(driver, library):
    library.failures["nvmlDeviceGetUtilizationRates", 0] = 4

    assert GpuSample(G0, used_mib=0) == await driver.sample(G0)
    assert 1 == library.calls["nvmlInit"]


async def test_a_gpu_that_does_not_answer_is_named_and_the_other_answers(driver, library):
    library.hanging.add(("*", 0))
    with pytest.raises(GpuError, match="GPU GPU-0: no answer in time") as caught:
        await driver.sample(G0)
    assert not caught.value.lost
    with pytest.raises(GpuError, match="an earlier call about GPU-0 has not returned"):
        await driver.sample(G0)

    assert (await driver.sample(G1)) is not None


@pytest.mark.parametrize(("code", "lost"), [(15, True), (28, True), (999, False)])
async def test_an_error_of_one_gpu_is_ours_and_names_it(driver, library, code, lost):
    library.failures["nvmlDeviceGetHandleByUUID", 0] = code
    with pytest.raises(GpuError, match="GPU GPU-0: ") as caught:
        await driver.sample(G0)

    assert ("GPU-0", lost) == (caught.value.gpu, caught.value.lost)
