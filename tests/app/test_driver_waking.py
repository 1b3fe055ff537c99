"""GPUs that take long to wake: served as soon as they answer, and not taken for a missing driver.

The agent, joined over the real pynvml and the C stub.
"""

import asyncio

import pytest
import structlog

from agent.cli import doctor
from agent.cli.checks import judge_driver
from tests.app.front_node import joined, running, watched
from tests.fakes.nvml import until

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

DEADLINE, SLOW, SLOWER = 0.6, 0.45, 1.8
"""As 2 s, 1.5 s and 6 s for an agent. Its own slowness extends the deadline, up to the double."""


@pytest.fixture
def deadline() -> float:
    return DEADLINE


def said(front) -> dict[str, str]:
    """What /readyz says of each condition that does not hold."""
    return {one.name: one.text for one in watched(front).checks() if not one.ok}


@pytest.mark.parametrize(
    ("count", "seconds", "serial"), [(1, SLOWER, False), (8, SLOWER, False), (8, SLOW, True)]
)
async def test_a_gpu_is_served_as_soon_as_it_is_awake(stub_driver, stub, count, seconds, serial):
    stub.order(range(count))
    stub.set(2, memory=16 << 30)
    stub.wake_slowly(range(count), seconds, serial=serial)
    front = joined(stub_driver)
    with structlog.testing.capture_logs() as lines:
        async with running(front) as node:
            await until(lambda: bool(front.keeper.left_out.value))
            waking = said(front)
            await until(lambda: len(node.served) == count)
            await until(lambda: "gpus_answering" not in said(front))

    assert 1 == waking["gpus_answering"].count("it may still be initialising")
    silent, _, _ = waking["gpus_answering"].partition(": no answer")
    assert count - 1 <= silent.count("index ")  # where one wakes after the other, any is the first
    told = [line["err"] for line in lines if line["event"] == "inventory.gpu_left_out"]
    assert all("reset" not in text for text in told)
    assert count >= len(told)


async def test_readiness_tells_a_waking_gpu_from_a_missing_driver(stub_driver, stub):
    stub.order([0])
    stub.wake_slowly([0], SLOWER)
    front = joined(stub_driver)
    async with running(front):
        await until(lambda: bool(front.keeper.left_out.value))
        waking = said(front)["inventory"]

    assert waking.startswith(
        "the driver answers; GPU index 0: no answer in time; it may still be initialising"
    )


async def test_a_look_before_the_start_waits_for_gpus_that_wake(stub_driver, stub):
    stub.wake_slowly([1], SLOWER)
    scans = []

    async def looks():
        while True:
            scans.append(await stub_driver.scan())
            yield scans[-1]
            await asyncio.sleep(0.05)

    found, failure, _ = await doctor.last_scan(looks())

    assert len(scans) > 1
    assert (scans[-1], "") == (found, failure)
    assert ["ok"] == [one.verdict for one in judge_driver("NVML", found, failure)]


async def test_a_gpu_that_never_wakes_is_named_and_the_driver_is_not_said_to_be_missing(
    stub_driver, stub
):
    stub.hang(slot=0)
    stub.hang(slot=1)
    stub.hang(slot=2)
    first, *others = judge_driver("NVML", await stub_driver.scan(), "")

    assert "driver 999.1 answers but describes no GPU" == first.said
    assert "install" not in first.advice
    assert [f"GPU index {n}: no answer in time" for n in range(3)] == [one.said for one in others]
    assert all("it may still be initialising" in one.advice for one in others)
