"""Sidecars run beside the app containers: what is true lets a pod in, and what is oversold is told.

HAMi 2.10 counts a sidecar as an init container, so it places more than fits, and at times keeps
what is free.
"""

import itertools

import msgspec
import pytest

from agent.cluster import Phase, Role
from agent.errors import Refusal, RefusalReason
from agent.ledger import ContainerEdits, Ledger, State
from tests.builders import a_container, a_gpu, a_shared_gpu, a_uuid, an_inventory
from tests.cuda_order import limits_in_force
from tests.services.allocation.allocating import G1, a_desk, ids, placed

ROLES = {"s": Role.SIDECAR, "i": Role.INIT, "a": Role.APP}


def a_pod_of(number, text):
    """A pod such as `s30000 a30000`: sidecars, init containers and apps, each with its MiB."""
    words = text.split()
    containers = tuple(
        a_container(name=f"{word[0]}{place}", role=ROLES[word[0]])
        for place, word in enumerate(words)
    )
    groups = "".join(f"{G1},NVIDIA,{word[1:]},1:;" for word in words)
    return placed(number, groups, containers=containers)


async def run(desk, pod):
    """The kubelet admits the whole pod. Raises Refusal."""
    desk.bind(pod)
    held = {}
    for one in pod.containers:
        await desk.service.allocate(ids(len(desk.ledger.rows)))
        desk.records.keys |= {row.key for row in desk.ledger.rows_of(pod.uid)}
        if one.role is not Role.INIT:
            held[one.name] = ids(len(desk.ledger.rows) - 1)[0]
            desk.witness.admit(pod, **held)


def past_init(pod):
    """The same pod once it runs."""
    containers = tuple(
        msgspec.structs.replace(one, has_run=True, succeeded=one.role is Role.INIT)
        for one in pod.containers
    )
    return msgspec.structs.replace(pod, phase=Phase.RUNNING, containers=containers)


OVERSOLD = {
    "a sidecar and an app each": ("s30000 a30000", "s30000 a30000", 120000),
    "two sidecars": ("s20000 s20000 a20000", "s10000 a20000", 90000),
    "init after a sidecar": ("s30000 i40000 a1000", "s5000 a20000", 95000),
    "init before a sidecar": ("i40000 s30000 a30000", "a30000", 90000),
}


@pytest.mark.parametrize(("first", "second", "total"), OVERSOLD.values(), ids=OVERSOLD)
async def test_what_hami_places_beyond_the_gpu_is_served_and_told(first, second, total):
    async with a_desk() as desk:
        await run(desk, a_pod_of(1, first))
        assert [] == desk.said
        await run(desk, a_pod_of(2, second))

        event = desk.said[-1]
        assert ("GpuOversold", True) == (event.reason, event.warning)
        assert f"has given out {total} MiB of memory of GPU 0" in event.text
        assert "which has 81559 MiB" in event.text
        assert "sidecars" in event.text


async def test_a_pod_that_truly_fits_is_served_although_hami_counts_a_peak_that_is_over():
    """For HAMi 2.10 the init phase never ends with a sidecar."""
    async with a_desk() as desk:
        pod = a_pod_of(1, "i60000 s1000 a10000")
        await run(desk, pod)
        desk.see(past_init(pod))
        await run(desk, a_pod_of(2, "a70000"))

        assert [] == desk.said
        assert 4 == len(desk.ledger.rows)


ALONE = ("s50000 a50000", "s50000 i50000 a1", "s30000 s30000 a30000", "i1 s50000 a50000")


@pytest.mark.parametrize("text", ALONE)
async def test_a_pod_that_alone_is_more_than_the_gpu_is_refused_and_told_what_to_do(text):
    async with a_desk() as desk:
        with pytest.raises(Refusal, match="let its containers ask for less") as caught:
            await run(desk, a_pod_of(1, text))

        assert RefusalReason.MEMORY_EXCEEDED is caught.value.gate
        assert 0 == desk.refreshes


@pytest.mark.parametrize("text", ["s40000 a41559", "i81559 s40000 a41559", "s40000 i41559 a41559"])
async def test_a_pod_that_just_fits_alone_is_served(text):
    async with a_desk() as desk:
        await run(desk, a_pod_of(1, text))
        assert [] == desk.said


async def test_a_pod_is_refused_where_both_sums_are_too_much_and_no_pod_has_ended():
    async with a_desk() as desk:
        await run(desk, a_pod_of(1, "s40000 a40000"))
        desk.bind(a_pod_of(2, "a50000"))
        with pytest.raises(Refusal, match="130000 MiB of memory promised, and it has 81559") as no:
            await desk.service.allocate(ids(9))

        assert RefusalReason.MEMORY_EXCEEDED is no.value.gate
        assert 1 == desk.refreshes


# Containers with GPUs of several models: each GPU has the limit that the scheduler wrote for it.
#
# By itself CUDA numbers the fastest GPU first, and HAMi-core finds limits by CUDA's number.


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
