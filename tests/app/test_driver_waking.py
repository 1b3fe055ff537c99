"""GPUs that take long to wake: served as soon as they answer, and not taken for a missing driver.

The agent, joined over the real pynvml and the C stub.
"""

import contextlib
from functools import partial

import pytest
import structlog

from agent.cli import doctor
from agent.cli.doctor import judge_driver
from agent.settings.reading import Sources, make_plan
from tests.app.front_node import joined, running, watched
from tests.fakes.nvml_stub import until

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

HANDLE = "nvmlDeviceGetHandleByIndex_v2"
"""Without the persistence daemon the first one of each GPU wakes it."""
ANSWERS = (
    "the driver answers; GPU index 0: no answer in time; without the persistence daemon it "
    "initialises for seconds, then it is shared"
)


def said(front) -> dict[str, str]:
    """What /readyz says of each condition that does not hold."""
    return {one.name: one.text for one in watched(front).checks() if not one.ok}


def serves(node, count) -> bool:
    return len(node.served) == count


@pytest.mark.parametrize("count", [1, 8])
async def test_a_gpu_is_served_as_soon_as_it_is_awake(stub_driver, stub, count):
    stub.order(range(count))
    stub.set(2, memory=16 << 30)
    for slot in range(count):
        stub.hang(HANDLE, slot)
    front = joined(stub_driver)
    with structlog.testing.capture_logs() as lines:
        async with running(front) as node:
            await until(lambda: len(front.keeper.left_out.value) == count)
            waking = said(front)
            for slot in range(count):
                stub.hang(HANDLE, slot, hung=False)
                await until(partial(serves, node, slot + 1))
            await until(lambda: "gpus_answering" not in said(front))

    assert count > 1 or waking["inventory"].startswith(ANSWERS)
    assert 1 == waking["gpus_answering"].count("it initialises for seconds")
    silent, _, _ = waking["gpus_answering"].partition(": no answer")
    assert count == silent.count("index ")
    told = [line["err"] for line in lines if line["event"] == "inventory.gpu_left_out"]
    assert all("reset" not in text for text in told)
    assert count >= len(told)


async def test_a_look_before_the_start_waits_for_gpus_that_wake(stub_driver, stub, monkeypatch):
    settings = make_plan(Sources(flags={"--scheduler": "none"}, host="host")).settings()
    scans = []

    class Watched:
        async def scan(self):
            scans.append(await stub_driver.scan())
            stub.hang(HANDLE, 1, hung=len(scans) < 2)
            return scans[-1]

    @contextlib.asynccontextmanager
    async def opened(_):
        yield Watched()

    monkeypatch.setattr(doctor, "open_driver", opened)
    monkeypatch.setattr(doctor, "LOOK_SECONDS", 0.05)
    stub.hang(HANDLE, 1)
    found = await doctor.examine(doctor.NodeSeen(settings, {}, frozenset({"driver"})))

    assert len(scans) > 1
    assert [("P-DRIVER", "ok")] == [(one.check, one.verdict) for one in found]


async def test_a_gpu_that_never_wakes_is_named_and_the_driver_is_not_said_to_be_missing(
    stub_driver, stub
):
    stub.hang(slot=0)
    stub.hang(slot=1)
    stub.hang(slot=2)
    (found,) = judge_driver("NVML", await stub_driver.scan(), "", "")

    assert found.said.startswith("driver 999.1, 0 GPUs: it describes none; ")
    assert all(f"GPU index {n}: no answer in time" in found.said for n in range(3))
    assert "it initialises for seconds" in found.said
