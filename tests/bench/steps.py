"""What one Allocate computes, step by step: everything that it waits for is in memory."""

import time

from agent.allocate.inquiry import SchedulerShares
from agent.allocate.service import AllocateCall, Allocation
from agent.kubelet.door import container_response
from agent.ledger import State
from agent.model import SliceId
from agent.state import StateEncoder
from agent.wire.v1beta1 import AllocateRequest, AllocateResponse, ContainerAllocateRequest
from tests.bench.figures import Figure
from tests.services.allocation.allocating import G1, Desk, a_desk, ids, placed
from tests.services.allocation.full_node import fill

NODES = (10, 110, 500)
"""Pods that hold a slice already."""
GPUS, SLICES = 16, 100
TRIES = 40
STEPS = {
    "decode": "Allocate: decode the request",
    "match": "… match: the pod, its share, the row",
    "state": "… encode the state",
    "answer": "… encode the answer",
}
_HOW = "the agent's functions, by themselves; kubelet and disk are in memory"


class _Timed:
    """The share source of a desk, and the seconds that its decision took."""

    def __init__(self, shares: SchedulerShares) -> None:
        self._shares = shares
        self.calls = shares.calls
        self.refused = shares.refused
        self.prefer = shares.prefer
        self.took = 0.0

    async def decide(self, ids: tuple[SliceId, ...], call: AllocateCall) -> None:
        begun = time.perf_counter()
        await self._shares.decide(ids, call)
        self.took = time.perf_counter() - begun


async def steps(_: int) -> list[Figure]:
    """Decode the request, find the pod and its share, encode the state, encode the answer."""
    found: list[Figure] = []
    for pods in NODES:
        tries: list[tuple[float, ...]] = []
        for _try in range(TRIES):
            async with a_desk() as desk:
                await fill(desk, pods, 1, GPUS, SLICES)
                tries.append(await _took(desk))
        for step, what, took in zip(STEPS, STEPS.values(), zip(*tries, strict=True), strict=True):
            samples = [seconds * 1000 for seconds in took]
            told = f"{what}, {pods} pods"
            found.append(Figure(f"step_{step}_{pods}", told, "ms", samples, _HOW))
    return found


async def _took(desk: Desk) -> tuple[float, ...]:
    """Seconds for each of STEPS of one Allocate, for a pod that has just been bound."""
    source = _Timed(desk.shares)
    service = Allocation(source, desk.state.commit, desk.hooks, desk.said.append)
    encoder = StateEncoder()
    encoder.encode(State(ledger=desk.ledger))
    data = bytes(AllocateRequest([ContainerAllocateRequest([*ids(SLICES - 1)])]))
    desk.bind(placed(1_000_000, f"{G1},NVIDIA,1,0:;", reusable_name=False))

    begun = time.perf_counter()
    asked = tuple(map(SliceId, AllocateRequest.parse(data).container_requests[0].devices_ids))
    decoded = time.perf_counter()
    edits = await service.allocate(asked)
    allocated = time.perf_counter()
    encoder.encode(State(ledger=desk.ledger))
    stored = time.perf_counter()
    bytes(AllocateResponse([container_response(edits)]))
    answered = time.perf_counter()
    return decoded - begun, source.took, stored - allocated, answered - stored
