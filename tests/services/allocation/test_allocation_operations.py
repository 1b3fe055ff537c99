"""What one Allocate does is counted. It does not grow with the pods and rows of the node.

Three things grow: with each row the bytes that are written, with each row on the GPU of the
container the sums, and with each pod that was deleted within the last minute a look at it.
"""

import asyncio
import datetime as dt
import sys
from collections import Counter
from types import FrameType

import msgspec
import pytest

from agent.cluster import Phase, PodView
from agent.errors import WitnessThrottled
from agent.ledger import Ledger, State
from tests.builders import NOON, a_container, a_gpu, a_row, a_shared_gpu, an_inventory
from tests.fakes.chance import Seeded
from tests.services.allocation.allocating import (
    EPOCH,
    G1,
    NEXT_EPOCH,
    Desk,
    a_desk,
    fill,
    ids,
    placed,
)

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


# A reboot with a lost checkpoint: the kubelet admits all its pods anew, and asks for each.


REBOOTED = 110
BURST, RATE = 10.0, 100.0
"""Questions that the kubelet answers at once, and then in a second."""
GAP = 0.03
"""Seconds between two Allocates of a kubelet that takes up its pods."""


class Bucket:
    """The rate limit of PodResources, on the loop's clock."""

    def __init__(self) -> None:
        self.left, self.at = BURST, asyncio.get_running_loop().time()

    def take(self) -> None:
        """Raises WitnessThrottled."""
        now = asyncio.get_running_loop().time()
        self.left = min(BURST, self.left + (now - self.at) * RATE)
        self.at = now
        if self.left < 1.0:
            raise WitnessThrottled("rejected by rate limit")
        self.left -= 1.0


def limited(desk: Desk) -> None:
    """Each question takes a millisecond, and there are no more than the kubelet allows."""
    bucket, get = Bucket(), desk.witness.get
    desk.witness.delay = 0.001

    async def ask(namespace: str, name: str):
        bucket.take()
        return await get(namespace, name)

    desk.witness.get = ask  # type: ignore[assignment, method-assign]


def pods_of(second: int) -> list[PodView]:
    """All pods as the API server still shows them; `second`: so many were created in each."""
    found = []
    for number in range(REBOOTED):
        text = f"{a_gpu(index=number % 16).uuid},NVIDIA,{1000 + number},1:;"
        ran = msgspec.structs.replace(a_container(), has_run=True, running_id=f"old-{number}")
        found.append(
            placed(
                number,
                text,
                phase=Phase.RUNNING,
                created=NOON - dt.timedelta(hours=1) + dt.timedelta(seconds=number // second),
                containers=(ran,),
                reusable_name=bool(number % 2),
            )
        )
    return found


def row_of(pod: PodView):
    (shares,) = filter(None, pod.groups or ())
    return a_row(pod_uid=pod.uid, pod=pod.name, shares=shares, epoch=EPOCH, confirmed=True)


@pytest.mark.parametrize(
    ("second", "seed"), [(10, 0), (110, 0)], ids=["ten at once", "all at once"]
)
@pytest.mark.timeout(60)
async def test_all_of_110_pods_are_answered_as_before(second, seed):
    pods = pods_of(second)
    ledger = Ledger(tuple(map(row_of, pods)))
    async with a_desk(State(ledger=ledger)) as desk:
        desk.epoch = NEXT_EPOCH
        desk.inventory.set(
            an_inventory(gpus=tuple(a_shared_gpu(gpu=a_gpu(index=n)) for n in range(16)))
        )
        desk.see(*pods)
        limited(desk)
        chance = Seeded(seed)
        for pod in sorted(pods, key=lambda pod: (pod.created, chance.random())):
            desk.witness.admit(pod)
            free = ids(0, gpu=0)
            await desk.service.prefer(free, (), 1)

            await desk.service.allocate(free)

            desk.witness.admit(pod, main=free[0])
            desk.records.keys = (desk.records.keys or frozenset()) | {row_of(pod).key}
            await asyncio.sleep(GAP)

        assert {("replay", ""): REBOOTED} == desk.results
        assert {row.key: row.edits for row in ledger.rows} == {
            row.key: row.edits for row in desk.ledger.rows
        }
