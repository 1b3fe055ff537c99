"""The driver answers nothing for ten minutes: what goes on, what is refused, and the way back.

The agent is joined over simulated hardware.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import pytest
from aiohttp.test_utils import make_mocked_request

from agent.errors import Refusal, RefusalReason
from agent.sandbox.hardware import SimulatedHardware
from agent.web.server import livez, readyz
from tests.app.front_node import FrontNode, joined, running, watched
from tests.builders import a_gpu
from tests.fakes.driver import HardwareDriver
from tests.services.allocating import G1, ids, placed

HANG, LIMIT = 600.0, 60.0


class HungNode:
    """A node of two GPUs that were found, and the kubelet's calls."""

    def __init__(self, hardware: SimulatedHardware, at_work: FrontNode) -> None:
        self.hardware, self.at_work = hardware, at_work
        self.desk = at_work.desk()
        self.checks = watched(at_work.front).checks
        self.pods = 0

    async def allocate(self) -> None:
        """A pod of GPU 0 comes, and the kubelet asks for it. Raises Refusal."""
        self.pods += 1
        pod = self.desk.bind(placed(self.pods, f"{G1},NVIDIA,100,1:;"))
        (asked,) = ids(self.pods)
        try:
            await self.desk.service.allocate((asked,))
        except Refusal:
            self.desk.witness.forget(pod)
            self.desk.bury(pod)
            raise
        self.desk.witness.admit(pod, main=asked)

    @property
    def healthy(self) -> list[bool]:
        return [group.healthy for group in self.at_work.groups.values()]

    @property
    def probed(self) -> str:
        """/livez and /readyz, answered in the same instant."""
        request = make_mocked_request("GET", "/readyz?verbose")
        assert 200 == livez(request).status
        return str(readyz(self.checks, request).text)


@contextlib.asynccontextmanager
async def a_node() -> AsyncIterator[HungNode]:
    hardware = SimulatedHardware((a_gpu(index=0), a_gpu(index=1)))
    async with running(joined(HardwareDriver(hardware))) as node:
        yield HungNode(hardware, node)


async def test_a_driver_that_hangs_for_ten_minutes_stops_allocations_after_the_limit_and_no_probe():
    async with a_node() as node:
        await node.allocate()
        node.hardware.hang(HANG)
        began = asyncio.get_running_loop().time()
        served_until = 0.0
        while (passed := asyncio.get_running_loop().time() - began) < HANG - 5:
            assert node.probed
            if all(node.healthy):
                served_until = passed
                await node.allocate()
            else:
                with pytest.raises(Refusal, match="has not answered for its GPU 0") as refused:
                    await node.allocate()
                assert RefusalReason.DRIVER_UNRESPONSIVE is refused.value.gate
                assert refused.value.transient
                assert [False, False] == node.healthy
            await asyncio.sleep(5 if passed < 100 else 50)

        # The hang shows at the next round of probes, at most 12 s after it began.
        assert LIMIT <= served_until + 5 <= LIMIT + 17
        told = ["GpuDriverUnresponsive", "GpuUnhealthy"]
        assert told == [one for one in node.at_work.reasons if one != "GpuDegradedForPod"]
        assert (
            f"gpu_health degraded: GPU 0 ({G1}) is unmonitored: it does not answer" in node.probed
        )

        await asyncio.sleep(5 + 15)
        assert [True, True] == node.healthy
        await node.allocate()
        await asyncio.sleep(30)
        assert "GpuRecovered" == node.at_work.reasons[-1]
        assert "gpu_health ok" in node.probed


async def test_what_a_hung_driver_had_to_report_is_heard_when_it_is_back():
    async with a_node() as node:
        node.hardware.hang(HANG)
        node.hardware.xid("1", 79)
        await asyncio.sleep(HANG + 15)

        assert [True, False] == node.healthy
        await node.allocate()


LOST = "the driver no longer reaches it (GPU is lost); if this lasts, reboot the node [H-LOST]"
REFUSED = "the driver refused calls for it; reset it or reboot the node [H-RESET]"
FELL = "the driver no longer reaches it (after XID 79); if this lasts, reboot the node [H-079]"


@pytest.mark.parametrize(
    ("strike", "condition", "text"),
    [
        (lambda hardware: hardware.lose("0"), "lost", LOST),
        (lambda hardware: hardware.refuse("0"), "bad", REFUSED),
        (lambda hardware: hardware.xid("0", 79), "lost", FELL),
    ],
)
async def test_what_is_said_of_an_ill_gpu_is_a_sentence_everywhere(strike, condition, text):
    async with a_node() as node:
        await asyncio.sleep(12)  # between two probes
        strike(node.hardware)
        await asyncio.sleep(30)
        node.at_work.front.discovery.rescan()
        await asyncio.sleep(70)

        assert f"gpu_health degraded: GPU 0 ({G1}) is {condition}: {text}\n" in node.probed
        said = re.escape(f"its GPU 0 ({G1}) is {condition}: {text}")
        with pytest.raises(Refusal, match=said):
            await node.allocate()
