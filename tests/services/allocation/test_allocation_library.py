"""Without HAMi-core on the node no limit would be kept: such an answer is none."""

import pytest

from agent.errors import Refusal, RefusalReason
from tests.builders import a_container, a_gpu, a_shared_gpu, an_inventory
from tests.services.allocation.allocating import NEXT_EPOCH, a_desk, ids, placed
from tests.services.allocation.plain_node import a_node
from tests.unit.core.allocation import plain_scene

LIBRARY = "/usr/local/vgpu/libvgpu.so"


async def refused(asked):
    with pytest.raises(Refusal) as caught:
        await asked
    assert RefusalReason.NO_LIBRARY is caught.value.gate
    assert caught.value.transient
    return caught.value.sentence


@pytest.mark.parametrize("disabled", [False, True])
async def test_a_container_is_refused_with_what_is_missing_and_nothing_is_written(disabled):
    """Also one that wants no HAMi-core: its mounts would stand in the way of the installation."""
    async with a_desk() as desk:
        desk.bind(placed(1, containers=(a_container(control_disabled=disabled),)))
        desk.hooks.missing = (LIBRARY,)

        sentence = await refused(desk.service.allocate(ids(1)))

        assert LIBRARY in sentence
        assert "ask the operator to install it" in sentence
        assert ((), set()) == (desk.ledger.rows, desk.hooks.names)


async def test_a_container_that_would_not_load_it_is_refused_and_one_that_wants_none_is_served():
    async with a_desk() as desk:
        desk.hooks.preload = "/opt/vgpu/libvgpu.so\n"
        desk.bind(placed(1))
        sentence = await refused(desk.service.allocate(ids(1)))
        desk.witness.forget(placed(1))
        desk.bind(placed(2, containers=(a_container(control_disabled=True),)))
        await desk.service.allocate(ids(1))

        assert f"make {LIBRARY} its only line" in sentence
        assert ["train-2"] == [row.pod for row in desk.ledger.rows]


MISSED = a_shared_gpu(present=False, obstacle="no CDI specification defines it; write one")
UNDEFINED = an_inventory(gpus=[MISSED, a_shared_gpu(gpu=a_gpu(index=1))])


async def test_a_container_that_was_answered_before_is_answered_again():
    async with a_desk() as desk:
        desk.bind(placed(1))
        first = await desk.service.allocate(ids(1))
        desk.lock(None)
        desk.epoch = NEXT_EPOCH
        desk.hooks.missing = (LIBRARY,)

        assert first == await desk.service.allocate(ids(1))


async def test_plain_mode_needs_it_for_limits_alone():
    async with a_node() as node:
        node.hooks.missing = (LIBRARY,)
        await refused(node.service.allocate(plain_scene.ids(1)))
        assert () == node.rows
    async with a_node(limits=False) as node:
        node.hooks.missing = (LIBRARY,)

        await node.service.allocate(plain_scene.ids(1))
