"""GetPreferredAllocation against HAMi's own choices."""

import pytest

from agent.model import SliceId
from tests.builders import G1, G2, a_container, a_gpu, a_shared_gpu, an_inventory
from tests.hami_vectors import Vector, cases, vectors
from tests.services.allocation.allocating import a_desk, placed

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
        gpus = [a_gpu(uuid=uuid, index=number) for number, uuid in enumerate((G1, G2))]
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
