"""The driver answers nothing for ten minutes: what goes on, what is refused, and the way back.

The agent is joined over simulated hardware.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from agent.app.agent import NodeAgent
from agent.cluster import NodeEvent
from agent.errors import Refusal, RefusalReason
from agent.model import Scan, slice_id
from agent.node import Check
from agent.sandbox.hardware import Description, SimulatedHardware
from agent.web.server import livez, readyz
from tests.app.front_node import joined, runs, watched
from tests.builders import a_gpu
from tests.fakes.apiserver import EventSink
from tests.fakes.driver import HardwareDriver
from tests.services.allocating import G1, Desk, a_desk, ids, placed
from tests.services.at_work import at_work

HANG, LIMIT = 600.0, 60.0


@dataclasses.dataclass
class HungNode:
    """The agent, its hardware, and what people are told."""

    front: NodeAgent
    hardware: SimulatedHardware
    desk: Desk
    checks: Callable[[], tuple[Check, ...]]
    events: list[NodeEvent]
    pods: int = 0

    @property
    def told(self) -> list[str]:
        """The reasons of what people are told."""
        return [event.reason for event in self.events]

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

    def probed(self) -> tuple[int, str]:
        """/livez and /readyz, answered in the same instant."""
        request = make_mocked_request("GET", "/readyz?verbose")
        assert 200 == livez(request).status
        found = readyz(self.checks, request)
        assert found.text
        return found.status, found.text


@contextlib.asynccontextmanager
async def a_node() -> AsyncIterator[HungNode]:
    """A node of two GPUs that were found."""
    hardware = SimulatedHardware(Description("570", (a_gpu(index=0), a_gpu(index=1))))
    front = joined(HardwareDriver(hardware))
    sink = EventSink()

    async def follow_inventory() -> None:
        async for inventory in front.facts.inventory.follow():
            if inventory.generation:
                desk.inventory.set(inventory)

    standing = (
        front.state.run,
        *(front.discovery.run, front.health.run, runs(front)["gpu_events"]),
        *(follow_inventory, partial(front.notices.post_all, sink.post_event)),
    )
    async with a_desk() as desk, at_work(*standing):
        await front.facts.slices.until(lambda listed: len(listed.groups) == 2)
        checks = watched(front).checks
        yield HungNode(front, hardware, desk, checks, sink.posted)


def healthy(node: HungNode) -> list[bool]:
    return [group.healthy for group in node.front.facts.slices.value.groups]


async def test_a_driver_that_hangs_for_ten_minutes_stops_allocations_after_the_limit_and_no_probe():
    async with a_node() as node:
        await node.allocate()
        node.hardware.hang(HANG)
        began = asyncio.get_running_loop().time()
        served_until = 0.0
        while (passed := asyncio.get_running_loop().time() - began) < HANG - 5:
            node.probed()
            if all(healthy(node)):
                served_until = passed
                await node.allocate()
            else:
                with pytest.raises(Refusal) as refused:
                    await node.allocate()
                assert (RefusalReason.DRIVER_UNRESPONSIVE, True) == (
                    refused.value.gate,
                    refused.value.transient,
                )
                assert "the driver has not answered for its GPU 0" in refused.value.sentence
                assert [False, False] == healthy(node)
            await asyncio.sleep(5 if passed < 100 else 50)

        # The hang shows at the next round of probes, at most 12 s after it began.
        assert LIMIT <= served_until + 5 <= LIMIT + 17
        assert ["GpuDriverUnresponsive", "GpuUnhealthy"] == node.told
        assert "gpu_health degraded: GPU 0 is unmonitored: it does not answer" in node.probed()[1]

        await asyncio.sleep(5 + 15)
        assert [True, True] == healthy(node)
        await node.allocate()
        await asyncio.sleep(30)
        assert "GpuRecovered" == node.told[-1]
        assert "gpu_health ok" in node.probed()[1]


async def test_what_a_hung_driver_had_to_report_is_heard_when_it_is_back():
    async with a_node() as node:
        node.hardware.hang(HANG)
        node.hardware.xid("1", 79)
        await asyncio.sleep(HANG + 15)

        assert [True, False] == healthy(node)
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
        node.front.discovery.rescan()
        await asyncio.sleep(70)

        assert f"gpu_health degraded: GPU 0 is {condition}: {text}\n" in node.probed()[1]
        with pytest.raises(Refusal) as refused:
            await node.allocate()
        assert f"its GPU 0 ({G1}) is {condition}: {text}" in refused.value.sentence


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"filter_indexes": frozenset({0, 1})}, "is filtered out by the settings"),
        ({"mode": "mig"}, "is not shared: sharing.operatingMode is mig, which is not shared yet"),
        (None, "is not on the node any more"),
    ],
)
async def test_a_held_gpu_that_is_shared_no_more_or_gone_is_said_to_be_just_that(changed, why):
    async with a_node() as node:
        keeper, sharing = node.front.keeper, node.front.facts.sharing
        keeper.hold({G1: (slice_id(G1, 0),)})
        if changed is None:
            keeper.found(Scan("570.1", ()))
        else:
            sharing.set(msgspec.structs.replace(sharing.value, **changed))
            keeper.refresh()

        assert f"gpu_health degraded: GPU 0 {why}" in node.probed()[1]
