"""A driver that fails alike for all GPUs: real pynvml over the C stub, ten times as fast."""

import asyncio

import pytest

from agent.health import watch
from tests.app.front_node import SETTINGS, joined, running
from tests.fakes.nvml import until

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful", "quick")]

QUICK = SETTINGS.replace("driverHang: 60", "driverHang: 6s, probePeriod: 1s")
"""What takes 20 s on a node takes 2 s here."""


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watch, "SECOND_LOOK", 0.5)


def conditions(front) -> list[tuple[str, bool]]:
    return [(g.health.condition.value, g.serving) for g in front.facts.inventory.value.gpus]


@pytest.mark.parametrize("code", [15, 999])
async def test_one_error_of_all_gpus_for_twenty_seconds_condemns_none(stub_driver, stub, code):
    stub.order([0, 1, 3, 4])
    front = joined(stub_driver, settings=QUICK)
    async with running(front):
        await until(lambda: len(front.facts.inventory.value.gpus) == 4)
        for slot in (0, 1, 3, 4):
            stub.fail("any", slot, code=code)
        await asyncio.sleep(2.0)
        during = conditions(front)
        for slot in (0, 1, 3, 4):
            stub.fail("any", slot, code=0)
        await until(lambda: not any(g.health.silent for g in front.facts.inventory.value.gpus))
        await until(lambda: front.knowing.discovery.problem.value is None)
        reasons = {one.health.text for one in front.facts.inventory.value.gpus}
        after = conditions(front)

    assert [("unmonitored", True)] * 4 == during
    assert {True} == {serving for _, serving in after}
    assert all(not text or "H-DEAF" in text for text in reasons)  # events come in again later


@pytest.mark.parametrize("code", [15, 999])
async def test_a_session_whose_every_call_fails_is_opened_anew(stub_driver, stub, code):
    stub.order([0, 1])
    front = joined(stub_driver, settings=QUICK)
    async with running(front):
        await until(lambda: len(front.facts.inventory.value.gpus) == 2)
        begun = stub.calls("nvmlInitWithFlags")
        stub.spoil(code)
        await until(lambda: stub.calls("nvmlInitWithFlags") > begun, within=4.0)
        await until(lambda: all(serving for _, serving in conditions(front)))
        probe = await stub_driver.probe(front.facts.inventory.value.gpus[0].uuid)

    assert "passed" == probe.outcome.value
    assert 1 == stub.calls("nvmlInitWithFlags") - begun
