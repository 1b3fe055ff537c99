"""A reboot with a lost checkpoint: the kubelet admits all its pods anew, and asks for each."""

import asyncio
import datetime as dt

import msgspec
import pytest

from agent.cluster import Phase, PodView
from agent.errors import WitnessThrottled
from agent.ledger import Ledger, State
from tests.builders import NOON, a_container, a_gpu, a_row, a_shared_gpu, an_inventory
from tests.fakes.chance import Seeded
from tests.services.allocation.allocating import EPOCH, NEXT_EPOCH, Desk, a_desk, ids, placed

PODS = 110
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
    for number in range(PODS):
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
    ("second", "seed"),
    [(10, 0), (110, 0)],
    ids=["ten at once", "all at once"],
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

        assert {("replay", ""): PODS} == desk.results
        assert {row.key: row.edits for row in ledger.rows} == {
            row.key: row.edits for row in desk.ledger.rows
        }
