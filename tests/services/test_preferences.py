"""The offered ids: of the annotated GPU, and never an error."""

import asyncio

import pytest

from agent.allocate.service import PREFER_BUDGET, WATCH_PAUSE
from agent.errors import KubeletError
from agent.model import SliceId
from tests import builders
from tests.builders import a_container, a_gpu, a_shared_gpu, an_inventory
from tests.hami_vectors import Vector, cases, vectors
from tests.services.allocating import G1, G2, NEXT_EPOCH, a_desk, ids, placed

OFFERED = (*ids(0, 1, 2), *ids(0, 1, 2, gpu=1))


async def test_a_pod_that_our_watches_show_a_moment_after_the_kubelet_asks_is_waited_for():
    async with a_desk() as desk, asyncio.TaskGroup() as group:
        pod = placed(1, f"{G2},NVIDIA,3000,30:;")
        desk.witness.admit(pod)
        asked = group.create_task(desk.service.prefer(OFFERED, (), 1))
        for step in (lambda: desk.see(placed(2)), lambda: desk.see(pod), lambda: desk.lock(pod)):
            await asyncio.sleep(WATCH_PAUSE / 5)
            assert not asked.done()
            step()

        assert ids(0, gpu=1) == await asked
        assert 0 == desk.refreshes


async def test_nor_is_any_pod_waited_for_while_dead_containers_may_be_asking():
    """Meanwhile a whole other request could pass, and granting the earlier one ends the kubelet."""
    async with a_desk() as desk:
        desk.bind(placed(1))
        await desk.service.allocate(ids(0))
        desk.epoch = NEXT_EPOCH
        began = asyncio.get_running_loop().time()

        await desk.service.prefer(OFFERED, (), 2)

        assert began == asyncio.get_running_loop().time()


@pytest.mark.parametrize("trouble", ["stray", "nobody", "failing", "too many"])
async def test_without_a_pod_as_many_ids_are_offered_all_the_same_or_none(trouble):
    async with a_desk() as desk:
        if trouble == "stray":
            stray = placed(1, annotations={})
            desk.admit(stray)
        if trouble == "failing":
            desk.bind(placed(1))
            desk.witness.failures = [KubeletError("gone")] * 9
        if trouble == "too many":
            share = f"{G1},NVIDIA,1,1:"
            desk.bind(placed(1, share * 9 + ";", containers=(a_container(count=9),)))
        size = 9 if trouble == "too many" else 2

        chosen = await desk.service.prefer(OFFERED, (), size)

        assert (0 if trouble == "too many" else 2) == len(set(chosen))
        assert set(chosen) <= set(OFFERED)
        assert 0 == desk.refreshes


async def answered(desk, offered, asked):
    """The row of a pod; `offered`: what was asked about in turn; (): in vain."""
    desk.bind(placed(1, f"{G2},NVIDIA,3000,30:;"))
    for each in offered:
        desk.witness.failures = [] if each else [KubeletError("gone")] * 9
        await desk.service.prefer(each or OFFERED, (), 1)
        desk.witness.failures = []
    await desk.service.allocate(asked)
    (row,) = desk.ledger.rows
    return row


@pytest.mark.parametrize(
    ("offered", "asked", "flags"),
    [
        ([OFFERED], ids(0, gpu=1), (True, False)),
        ([OFFERED], ids(0), (True, True)),
        ([ids(0, 1)], ids(0), (False, False)),
        ([OFFERED, ids(0, 1)], ids(0), (False, False)),
        ([OFFERED, ()], ids(0), (False, False)),
        ([], ids(0), (False, False)),
    ],
    ids=["taken", "ignored", "none is free", "none is free then", "a silent kubelet", "unasked"],
)
async def test_a_row_knows_whether_ids_of_its_gpu_were_offered_and_not_taken(offered, asked, flags):
    async with a_desk() as desk:
        row = await answered(desk, offered, asked)

        assert flags == (row.offered, row.mismatched)


async def test_an_offer_counts_for_one_answer():
    async with a_desk() as desk:
        row = await answered(desk, [OFFERED], ids(0, gpu=1))
        desk.lock(None)
        await desk.service.allocate(ids(0))

        (again,) = desk.ledger.rows
        assert (True, False) == (row.offered, again.offered)


async def test_a_kubelet_that_hangs_costs_little_time():
    async with a_desk() as desk:
        desk.bind(placed(1))
        desk.witness.hung = True
        began = asyncio.get_running_loop().time()

        chosen = await desk.service.prefer(OFFERED, (), 1)

        assert 1 == len(chosen)
        assert PREFER_BUDGET == pytest.approx(asyncio.get_running_loop().time() - began)


# GetPreferredAllocation against HAMi's own choices.


NEVER_AN_ERROR = {
    "preferred_allocation-172": "no slice of the annotated GPU is free",
    "preferred_allocation-173": "fewer GPUs are annotated than slices are asked for",
    "preferred_allocation-174": "what must be included is of another GPU",
}


async def preferred(vector: Vector) -> tuple[SliceId, ...]:
    """What is answered for a pod that the scheduler gave the annotated GPUs."""
    given = vector.given
    size = given["size"]
    text = "".join(
        f"{one['UUID']},NVIDIA,{one['Usedmem']},{one['Usedcores']}:" for one in given["annotated"]
    )
    async with a_desk() as desk:
        gpus = [
            a_gpu(uuid=uuid, index=number) for number, uuid in enumerate((builders.G1, builders.G2))
        ]
        desk.inventory.set(an_inventory(gpus=[a_shared_gpu(gpu=gpu) for gpu in gpus], generation=2))
        desk.bind(placed(1, text + ";", containers=(a_container(count=size),)))
        return await desk.service.prefer(
            tuple(given["available"]), tuple(given["mustInclude"] or ()), size
        )


@pytest.mark.parametrize("vector", cases("preferred_allocation", without=NEVER_AN_ERROR), ids=str)
async def test_the_ids_are_the_ones_that_hami_prefers(vector: Vector):
    assert vector.expected["deviceIDs"] == list(await preferred(vector))


@pytest.mark.parametrize("name", NEVER_AN_ERROR)
async def test_where_hami_fails_the_pod_as_many_ids_are_preferred_and_allocate_decides(name):
    """An error here fails the admission, and the kubelet forgets to free the ids."""
    vector = vectors("preferred_allocation")[name]
    assert vector.expected["error"]

    chosen = await preferred(vector)

    must = vector.given["mustInclude"] or []
    assert vector.given["size"] == len(set(chosen))
    assert must == list(chosen[: len(must)])
    assert set(chosen) <= set(vector.given["available"])
