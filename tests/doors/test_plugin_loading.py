"""A pod that is admitted while a busy node loads the agent waits for it, and is not refused."""

import asyncio

import pytest

from agent.core.errors import Refusal, RefusalReason
from agent.core.inventory.slices import SliceList
from agent.kit.cell import Cell
from agent.plugin.handlers import ALLOCATE_DEADLINE, LOADING_DEADLINE, DevicePlugin
from agent.plugin.traffic import Traffic
from agent.wire.v1beta1 import AllocateRequest, ContainerAllocateRequest
from tests.fakes.allocator import FakeAllocator

REQUEST = AllocateRequest(container_requests=[ContainerAllocateRequest(devices_ids=["a"])])


@pytest.fixture
def allocator() -> FakeAllocator:
    """It is not loaded yet."""
    made = FakeAllocator()
    made.is_loaded.clear()
    return made


@pytest.fixture
def plugin(allocator: FakeAllocator) -> DevicePlugin:
    return DevicePlugin(Cell(SliceList()), allocator, Traffic())


async def test_the_time_for_an_answer_begins_when_the_agent_is_loaded(plugin, allocator):
    allocator.open.clear()
    async with asyncio.TaskGroup() as group:
        call = group.create_task(plugin.allocate(REQUEST))
        await asyncio.sleep(LOADING_DEADLINE - 0.1)
        assert not allocator.asked
        allocator.is_loaded.set()
        await asyncio.sleep(ALLOCATE_DEADLINE - 0.1)
        allocator.open.set()

    assert {"EMPTY": "", "IDS": "a"} == call.result().container_responses[0].envs


async def test_an_agent_that_is_never_loaded_holds_up_the_kubelet_for_ten_seconds(plugin):
    began = asyncio.get_running_loop().time()
    with pytest.raises(Refusal) as refused:
        await plugin.allocate(REQUEST)

    assert LOADING_DEADLINE == asyncio.get_running_loop().time() - began
    assert RefusalReason.OUT_OF_TIME is refused.value.gate
    assert "still starting after 10 s; create the pod again." in str(refused.value)
