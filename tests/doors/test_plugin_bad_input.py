"""Bad input at the kubelet's door, with the real allocation and its ledger behind it.

Each is answered with its gRPC status, one sentence and the short id of the runbook; nothing is
written, and the door goes on answering others. Where only the kubelet's ids are odd, they are
counted and the container is served.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest
from grpclib import GRPCError
from grpclib.client import Channel
from grpclib.const import Status

from agent.app.front import Allocator
from agent.cluster import PodView
from agent.errors import RefusalReason
from agent.hami.pod import LENGTH_LIMIT
from agent.kit.cell import Cell
from agent.kube.objects import decode_pod
from agent.kubelet.door import PluginServer
from agent.state import CURRENT
from agent.wire.v1beta1 import (
    AllocateRequest,
    ContainerAllocateRequest,
    ContainerAllocateResponse,
    DevicePluginStub,
    Empty,
)
from tests.builders import NODE, a_pod_uid
from tests.fakes.chance import Seeded
from tests.fakes.door import RESOURCE, a_list
from tests.services.allocation.allocating import G1, G2, Desk, a_desk, annotated, ids, placed

pytestmark = pytest.mark.looptime(False)

DEADLINE = 5.0
"""Seconds for an answer that takes milliseconds on an idle machine."""

ONE = f"{G1},NVIDIA,3000,30:"
MANY = 10_000


def pod_object(text: str, count: int = 1) -> Mapping[str, object]:
    """The pod team-a/bad as the API server sends it, with that devices text."""
    containers = [{"name": "c0", "resources": {"limits": {RESOURCE: str(count)}}}]
    return {
        "metadata": {
            "uid": a_pod_uid(66),
            "namespace": "team-a",
            "name": "bad",
            "annotations": annotated(text, NODE),
        },
        "spec": {"nodeName": NODE, "containers": containers},
        "status": {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "True"}],
        },
    }


class RudeKubelet:
    """The kubelet's side of the door; the pod that it asks for owns the node lock."""

    def __init__(self, desk: Desk, plugin: DevicePluginStub) -> None:
        self.desk = desk
        self.plugin = plugin

    def admit(self, pod: PodView) -> None:
        self.desk.bind(pod)

    async def allocate(self, *containers: Sequence[str]) -> Sequence[ContainerAllocateResponse]:
        requests = [ContainerAllocateRequest(devices_ids=list(asked)) for asked in containers]
        message = AllocateRequest(container_requests=requests)
        return (await self.plugin.allocate(message, timeout=DEADLINE)).container_responses

    async def refused(self, *containers: Sequence[str]) -> tuple[Status, str]:
        with pytest.raises(GRPCError) as caught:
            await self.allocate(*containers)
        return caught.value.status, caught.value.message or ""

    async def stored(self) -> bytes:
        """The ledger as it is on disk."""
        return await self.desk.disk.content(CURRENT)


@contextlib.asynccontextmanager
async def a_kubelet(directory: Path) -> AsyncIterator[RudeKubelet]:
    """A node on which one pod was served and another, its neighbour, waits."""
    async with a_desk() as desk, asyncio.TaskGroup() as group:
        lists = Cell(a_list())
        allocator = Allocator()
        allocator.answers = desk.service
        server = PluginServer(directory, Cell(RESOURCE), lists, allocator, Seeded(0))
        running = group.create_task(server.run())
        await server.rebind()
        async with Channel(path=str(directory / server.endpoint)) as channel:
            served = desk.bind(placed(1))
            await desk.service.allocate(ids(0))
            desk.witness.admit(served, main=ids(0)[0])
            desk.see(placed(2))
            yield RudeKubelet(desk, DevicePluginStub(channel))
        running.cancel()


BAD = {
    "escapes and line feeds": (
        RefusalReason.MALFORMED_ANNOTATION,
        "is not a decimal",
        f"{G1},NVIDIA,\n\x1b[2J\x00 % ü,1:;",
        1,
    ),
    "oversize": (
        RefusalReason.MALFORMED_ANNOTATION,
        f"at most {LENGTH_LIMIT}",
        ONE + ":" * LENGTH_LIMIT,
        1,
    ),
    "memory beside another": (
        RefusalReason.MEMORY_EXCEEDED,
        "promised",
        f"{G1},NVIDIA,78560,1:;",
        1,
    ),
    "10,000 ids": (
        RefusalReason.COUNT_MISMATCH,
        "c0 requests 10000 GPUs",
        ONE + ";",
        MANY,
    ),
}
"""What is wrong in what the scheduler seems to have written, and what is said of it. All gates:
tests/unit/core/allocation/test_matching_gates.py."""


@pytest.mark.parametrize(("gate", "words", "text", "count"), BAD.values(), ids=BAD)
async def test_it_is_refused_in_a_sentence_and_nothing_is_written(
    tmp_path: Path, gate: RefusalReason, words: str, text: str, count: int
):
    async with a_kubelet(tmp_path) as kubelet:
        kubelet.admit(decode_pod(pod_object(text, count), RESOURCE))
        before, ledger = await kubelet.stored(), kubelet.desk.ledger
        made = dict(kubelet.desk.hooks.made)

        status, said = await kubelet.refused([f"GPU-{number}" for number in range(count)])

        assert Status.FAILED_PRECONDITION is status
        assert said.endswith(f" [{gate.value}]")
        assert 1 == len(re.findall(r"HA-\d{4}", said))
        assert words in said
        assert "team-a/bad" in said
        assert said.isprintable()
        assert len(said) < 700
        assert (before, ledger) == (await kubelet.stored(), kubelet.desk.ledger)
        assert made == kubelet.desk.hooks.made


@pytest.mark.parametrize(
    "asked",
    [
        [f"{G1}-0", f"{G1}-0"],
        [f"{G2}-1", f"{G2}-2"],
        ["GPU-elsewhere-7", "no slice"],
        ["MIG-unknown", ""],
        [f"{G1}-99999999999999999999", f"{G1}--1"],
    ],
    ids=["twice the same, and held", "of another GPU", "unknown", "MIG and empty", "no numbers"],
)
async def test_odd_ids_are_only_counted_and_the_annotation_is_served(tmp_path: Path, asked):
    async with a_kubelet(tmp_path) as kubelet:
        kubelet.admit(decode_pod(pod_object(f"{G2},NVIDIA,100,1:{G1},NVIDIA,200,2:;", 2), RESOURCE))

        (answer,) = await kubelet.allocate(asked)

        assert f"{G1},{G2}" == answer.envs["NVIDIA_VISIBLE_DEVICES"]
        assert "200m" == answer.envs["CUDA_DEVICE_MEMORY_LIMIT_0"]
        row = kubelet.desk.ledger.rows[-1]
        assert ("bad", tuple(sorted(asked))) == (row.pod, row.slice_ids)


async def test_ten_thousand_ids_keep_nobody_waiting(tmp_path: Path):
    async with a_kubelet(tmp_path) as kubelet:
        kubelet.admit(decode_pod(pod_object(f"{ONE};"), RESOURCE))
        asked = [f"{G1}-{number}" for number in range(MANY)]
        loop = asyncio.get_running_loop()

        async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
            calls = [group.create_task(kubelet.refused(asked)) for _ in range(2)]
            gaps = []
            while not all(call.done() for call in calls):
                began = loop.time()
                await kubelet.plugin.get_device_plugin_options(Empty())
                gaps.append(loop.time() - began)

        assert {Status.FAILED_PRECONDITION} == {call.result()[0] for call in calls}
        assert DEADLINE / 2 > max(gaps)
        (answer,) = await kubelet.allocate(ids(3))
        assert G1 == answer.envs["NVIDIA_VISIBLE_DEVICES"]


async def test_a_refusal_leaves_the_lock_owner_who_waits_as_it_was(tmp_path: Path):
    async with a_kubelet(tmp_path) as kubelet:
        desk = kubelet.desk
        stray = decode_pod(pod_object(f"{G1},NVIDIA,-1,1:;"), RESOURCE)
        desk.see(stray)
        desk.witness.admit(stray)
        desk.lock(placed(2))
        before = await kubelet.stored()

        status, text = await kubelet.refused(ids(7))

        assert (Status.FAILED_PRECONDITION, True) == (status, text.endswith(" [HA-2004]"))
        assert before == await kubelet.stored()
        desk.witness.forget(stray)
        desk.witness.admit(placed(2))
        (answer,) = await kubelet.allocate(ids(7))
        assert "3000m" == answer.envs["CUDA_DEVICE_MEMORY_LIMIT_0"]
