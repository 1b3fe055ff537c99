"""A reset that no driver tells of: over the real pynvml and the C stub, as before driver 570."""

import asyncio

import pytest

from agent.gpu.driver import NvmlDriver
from agent.gpu.nvml import pynvml as the_library
from agent.health import watch
from agent.ledger import State
from agent.model import GpuUuid
from tests.app.front_node import SETTINGS, joined, running
from tests.fakes.nvml import until

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful", "quick")]

QUICK = SETTINGS.replace("driverHang: 60", "quietPeriod: 1s, probePeriod: 1s")
G0 = GpuUuid("GPU-5708-0")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watch, "SECOND_LOOK", 0.1)


async def test_a_reset_while_the_agent_is_down_is_an_operators_word(stub_path, stub, tmp_path):
    stub.order([0, 1])
    for slot in (0, 1):
        stub.set(slot, recovery=-1)

    def a_driver() -> NvmlDriver:
        return NvmlDriver(the_library(), path=stub_path, sys_root=tmp_path, deadline=5)

    driver = a_driver()
    front = joined(driver, settings=QUICK)
    async with running(front) as node:
        await until(lambda: len(node.served) == 2)
        while len(node.served) == 2:
            stub.xid(0, 48)
            await asyncio.sleep(0.01)
    memory = dict(front.state.health)  # what is on disk when it has ended
    await driver.close()
    stub.lose(0)
    stub.lose(0, lost=False)  # reset, with nobody there to see it

    driver = a_driver()
    after = State(boot_id="boot", machine_id="machine", health=memory)
    front = joined(driver, after, settings=QUICK)
    async with running(front) as node:
        await until(lambda: bool(node.served))
        await asyncio.sleep(1.0)
        waits = node.shared(G0).health
        found = await front.knowing.health.recheck("0", was_reset=True)
        await until(lambda: len(node.served) == 2)
    await driver.close()

    assert (True, False) == (waits.needs_reset, waits.serving)
    assert found
    assert ("bad", False) == (found.after.condition.value, found.after.needs_reset)
    assert 0 == stub.undefined
