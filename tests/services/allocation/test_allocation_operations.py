"""What one Allocate does is counted. It does not grow with the pods and rows of the node.

Three things grow: with each row the bytes that are written, with each row on the GPU of the
container the sums, and with each pod that was deleted within the last minute a look at it.
"""

import asyncio
import sys
from collections import Counter
from types import FrameType

import pytest

from tests.services.allocation.allocating import G1, Desk, a_desk, fill, ids, placed

CALLS = 600
"""Function calls of one Allocate. Each row on its GPU adds up to CALLS_OF_A_ROW."""
CALLS_OF_A_ROW = 55
BYTES_OF_A_ROW = 2048


async def counted(desk: Desk) -> Counter[str]:
    """The agent's functions that one Allocate calls, for a pod that the node has not seen."""
    new = placed(1_000_000, f"{G1},NVIDIA,1,0:;", reusable_name=False)
    desk.bind(new)
    await asyncio.sleep(1)  # the look at the kubelet's start is over
    desk.records.reads = 0
    calls: Counter[str] = Counter()

    def count_call(frame: FrameType, event: str, _function: object) -> None:
        if event == "call" and "/agent/" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        await desk.service.allocate(ids(0))
    finally:
        sys.setprofile(before)
    assert new.uid in {row.key.pod_uid for row in desk.ledger.rows}
    return calls


@pytest.mark.parametrize(
    ("pods", "containers", "gpus", "slices"),
    [
        (0, 0, 1, 10),
        (10, 1, 8, 10),
        (110, 1, 16, 10),
        (110, 1, 16, 1000),
        (100, 1, 16, 1000),
        (500, 1, 16, 1000),
        (500, 20, 16, 1000),
    ],
)
async def test_an_allocate_does_no_more_on_a_full_node_than_on_an_empty_one(
    pods, containers, gpus, slices
):
    async with a_desk() as desk:
        await fill(desk, pods, containers, gpus, slices)
        desk.disk.writes = 0

        calls = await counted(desk)

        rows, rows_beside = pods * containers, -(-pods * containers // gpus)
        content = await desk.disk.content("state.json")
    assert CALLS + CALLS_OF_A_ROW * rows_beside >= calls.total(), calls.most_common(20)
    assert 3 * (rows_beside + 1) >= calls["_live"] + calls["scheduled"] + calls["claim_of"]
    assert (1, 0, 0) == (len(desk.witness.asked), len(desk.gets), desk.refreshes)
    assert (1, 1, 0) == (desk.disk.writes, desk.hooks.made.total(), desk.records.reads)
    assert BYTES_OF_A_ROW * (rows + 5) >= len(content)
