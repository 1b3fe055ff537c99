"""The fence: a container for which the kubelet booked another GPU does not start."""

import asyncio
from pathlib import Path

import grpc
import pytest

from agent.core.inventory.slices import slice_id
from agent.core.reconcile.mismatch import check_start
from agent.core.state.ledger import Ledger
from tests.builders import G1, G2, a_row
from tests.fakes.door import a_door
from tests.fakes.grpc_messages import GrpcPlugin

pytestmark = pytest.mark.looptime(False)

WRONG, RIGHT = slice_id(G2, 0), slice_id(G1, 1)
LEDGER = Ledger(
    (
        a_row(slice_ids=(WRONG,), offered=True),
        a_row(container="next", slice_ids=(RIGHT,), offered=True),
    )
)


def fence(ids) -> None:
    check_start(LEDGER, ids)


async def test_with_a_fence_the_kubelet_is_told_to_ask_before_each_start(tmp_path: Path):
    async with a_door(tmp_path, fence=fence) as door:
        plugin = GrpcPlugin(door.path)

        options = await asyncio.to_thread(plugin.options)

        assert (True, True) == (
            options.pre_start_required,
            options.get_preferred_allocation_available,
        )
        plugin.close()


async def test_the_start_of_a_mismatch_is_refused_with_a_sentence_and_an_id_each_time(
    tmp_path: Path,
):
    async with a_door(tmp_path, fence=fence) as door:
        plugin = GrpcPlugin(door.path)
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(plugin.pre_start, [WRONG])

            assert "FAILED_PRECONDITION" == caught.value.code().name
            assert f"booked slices of {G2} for it" in caught.value.details()
            assert caught.value.details().endswith("[HA-4006]")
        plugin.close()


@pytest.mark.parametrize("ids", [[RIGHT], ["unknown"], [RIGHT, WRONG], []])
async def test_every_other_start_goes_on_however_often_it_is_asked_for(tmp_path: Path, ids):
    async with a_door(tmp_path, fence=fence) as door:
        plugin = GrpcPlugin(door.path)

        for _ in range(3):
            await asyncio.to_thread(plugin.pre_start, ids)

        assert [3] == [n for key, n in door.server.traffic.calls.items() if key[0] == "prestart"]
        plugin.close()


async def test_a_start_is_answered_while_an_allocate_hangs(tmp_path: Path):
    async with a_door(tmp_path, fence=fence) as door:
        door.allocator.open.clear()
        plugin = GrpcPlugin(door.path)
        async with asyncio.TaskGroup() as group:
            hanging = group.create_task(asyncio.to_thread(plugin.allocate, [RIGHT]))

            await asyncio.to_thread(plugin.pre_start, [RIGHT])

            assert not hanging.done()
            door.allocator.open.set()
        plugin.close()
