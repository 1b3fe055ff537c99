"""Containers with GPUs of several models: each GPU has the limit that the scheduler wrote for it.

By itself CUDA numbers the fastest GPU first, and HAMi-core finds limits by CUDA's number.
"""

import itertools

import msgspec
import pytest

from agent.ledger import ContainerEdits, Ledger, State
from tests.builders import a_container, a_gpu, a_shared_gpu, a_uuid, an_inventory
from tests.cuda_order import limits_in_force
from tests.services.allocation.allocating import a_desk, ids, placed

MODELS = {"Tesla T4": 15360, "NVIDIA A100-SXM4-80GB": 81920, "NVIDIA H100 80GB HBM3": 81559}
SPEED = {name: rank for rank, name in enumerate(MODELS)}
BUSES = {
    "in steps": ("0000:10:00.0", "0000:20:00.0", "0000:30:00.0"),
    "one digit and two": ("0000:09:00.0", "0000:0a:00.0", "0000:10:00.0"),
    "several domains": ("0000:f0:00.0", "0001:10:00.0", "0002:01:00.0"),
    "virtual domains": ("ffff:10:00.0", "10000:10:00.0", "20000:01:00.0"),
    "as NVML writes them": ("00000000:0A:00.0", "00000000:1B:00.0", "00000001:02:00.0"),
    "of several forms": ("0000:0A:00.0", "00000000:0b:00.0", "0000:C0:00.0"),
    "by the device": ("0000:10:02.0", "0000:10:0a.0", "0000:10:10.0"),
}


def scene(buses, models, indexes=(0, 1, 2)):
    """Three GPUs; the scheduler gives each a limit of its own, and names the last one first."""
    gpus = [
        a_gpu(uuid=a_uuid(n), index=indexes[n], pci=buses[n], name=name, memory_mib=MODELS[name])
        for n, name in enumerate(models)
    ]
    inventory = an_inventory(gpus=[a_shared_gpu(gpu=gpu) for gpu in gpus])
    wrote = {gpu.uuid: (gpu.memory_mib or 0) * 2 // 5 + gpu.index for gpu in gpus}
    text = ":".join(f"{uuid},NVIDIA,{mib},30" for uuid, mib in reversed(wrote.items()))
    pod = placed(1, f"{text}:;", containers=(a_container(count=3),))
    return inventory, pod, wrote


async def in_force(inventory, pod):
    async with a_desk() as desk:
        desk.inventory.set(inventory)
        desk.bind(pod)
        envs = dict((await desk.service.allocate(ids(1, 2, 3))).envs)
    names = {shared.uuid: shared.gpu for shared in inventory.gpus}
    buses = {uuid: gpu.pci for uuid, gpu in names.items()}
    return limits_in_force(envs, buses, lambda uuid: SPEED[names[uuid].name])


@pytest.mark.parametrize("buses", BUSES.values(), ids=BUSES)
@pytest.mark.parametrize("models", list(itertools.permutations(MODELS)))
async def test_each_gpu_has_its_own_limit_wherever_it_sits(buses, models):
    inventory, pod, wrote = scene(buses, models)
    assert wrote == await in_force(inventory, pod)


@pytest.mark.parametrize("models", list(itertools.permutations(MODELS)))
async def test_the_bus_decides_and_not_the_index_that_the_driver_gave_last(models):
    """A GPU that was plugged in has an index at the end until the driver is loaded again."""
    inventory, pod, wrote = scene(BUSES["in steps"], models, indexes=(2, 0, 1))
    assert wrote == await in_force(inventory, pod)


async def test_where_a_bus_is_not_known_the_drivers_own_order_decides():
    inventory, pod, wrote = scene(("0000:30:00.0", "", "0000:10:00.0"), tuple(MODELS))
    async with a_desk() as desk:
        desk.inventory.set(inventory)
        desk.bind(pod)
        envs = dict((await desk.service.allocate(ids(1, 2, 3))).envs)

        assert [*wrote] == [share.uuid for share in desk.ledger.rows[0].shares]
    assert [*wrote] == envs["NVIDIA_VISIBLE_DEVICES"].split(",")
    assert [*wrote.values()] == [
        int(envs[f"CUDA_DEVICE_MEMORY_LIMIT_{place}"].removesuffix("m")) for place in range(3)
    ]


async def test_one_gpu_needs_no_order():
    async with a_desk() as desk:
        desk.bind(placed(1))
        assert "CUDA_DEVICE_ORDER" not in dict((await desk.service.allocate(ids(1))).envs)


async def test_an_answer_from_before_is_repeated_as_it_was():
    """The container may have run with it."""
    inventory, pod, _ = scene(BUSES["in steps"], tuple(MODELS))
    async with a_desk() as desk:
        desk.inventory.set(inventory)
        desk.bind(pod)
        await desk.service.allocate(ids(1, 2, 3))
        (row,) = desk.ledger.rows
    old = ContainerEdits(
        envs=tuple(pair for pair in row.edits.envs if pair[0] != "CUDA_DEVICE_ORDER"),
        mounts=row.edits.mounts,
    )
    kept = msgspec.structs.replace(row, edits=old)
    async with a_desk(State(ledger=Ledger((kept,)))) as desk:
        desk.inventory.set(inventory)
        desk.bind(pod)
        assert old == await desk.service.allocate(ids(4, 5, 6))
