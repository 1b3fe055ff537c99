"""Bad input at the kubelet's door, with the real allocation and its ledger behind it.

Each is answered with its gRPC status, one sentence and the short id of the runbook; nothing is
written, and the door goes on answering others. Where only the kubelet's ids are odd, they are
counted and the container is served.
"""

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest
from grpclib import GRPCError
from grpclib.client import Channel
from grpclib.const import Status

from agent.app.front import Allocator
from agent.codec.objects import decode_pod
from agent.codec.pod import LENGTH_LIMIT
from agent.core.cluster.pods import PodView
from agent.core.errors import RefusalReason
from agent.core.inventory.condition import Condition
from agent.kit.cell import Cell
from agent.plugin.server import PluginServer
from agent.services.state import CURRENT
from agent.wire.v1beta1 import (
    AllocateRequest,
    ContainerAllocateRequest,
    ContainerAllocateResponse,
    DevicePluginStub,
    Empty,
)
from tests.builders import NODE, a_gpu, a_health, a_pod_uid, a_shared_gpu, an_inventory
from tests.fakes.chance import Seeded
from tests.fakes.door import RESOURCE, a_list
from tests.services.allocation.allocating import G1, G2, Desk, a_desk, annotated, ids, placed

pytestmark = pytest.mark.looptime(False)

DEADLINE = 5.0
"""Seconds for an answer that takes milliseconds on an idle machine."""

ONE = f"{G1},NVIDIA,3000,30:"
MANY = 10_000


def pod_object(text: str | None, *counts: int, node: str = NODE) -> Mapping[str, object]:
    """The pod team-a/bad as the API server sends it, with that devices text."""
    notes = annotated(text or "", node)
    if text is None:
        del notes["hami.io/vgpu-devices-allocated"]
    containers = [
        {"name": f"c{place}", "resources": {"limits": {RESOURCE: str(count)}}}
        for place, count in enumerate(counts or (1,))
    ]
    return {
        "metadata": {
            "uid": a_pod_uid(66),
            "namespace": "team-a",
            "name": "bad",
            "annotations": notes,
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


@dataclasses.dataclass(frozen=True)
class Bad:
    """What is wrong in what the scheduler seems to have written, and what is said of it."""

    gate: RefusalReason
    words: str
    text: str | None = ONE + ";"
    counts: tuple[int, ...] = (1,)
    node: str = NODE
    ill: bool = False
    asked: int = 1
    status: Status = Status.FAILED_PRECONDITION
    named: bool = True


BAD = {
    "other groups than containers": Bad(
        RefusalReason.COUNT_MISMATCH, "for 2 containers, but 1", f"{ONE};{ONE};"
    ),
    "fewer GPUs than slices": Bad(
        RefusalReason.COUNT_MISMATCH, "c0 requests 2 GPUs", counts=(2,), asked=2
    ),
    "ids of no container's number": Bad(
        RefusalReason.NO_POD_ADMITTED, "asks for 3 slice(s)", asked=3, named=False
    ),
    "unknown GPU": Bad(
        RefusalReason.UNKNOWN_GPU,
        "GPU-00000000",
        "GPU-00000000-aaaa-0000-0000-000000000000,NVIDIA,1,1:;",
    ),
    "MIG instance": Bad(RefusalReason.UNKNOWN_GPU, "[1-0]", f"{G1}[1-0],NVIDIA,9728,14:;"),
    "bad GPU": Bad(RefusalReason.BAD_GPU, "is bad: XID 79", ill=True),
    "memory": Bad(RefusalReason.MEMORY_EXCEEDED, "81559 MiB", f"{G1},NVIDIA,81560,1:;"),
    "memory beside another": Bad(
        RefusalReason.MEMORY_EXCEEDED, "promised", f"{G1},NVIDIA,78560,1:;"
    ),
    "all of it beside another": Bad(
        RefusalReason.MEMORY_EXCEEDED, "promised", f"{G1},NVIDIA,0,1:;"
    ),
    "compute": Bad(RefusalReason.CORES_EXCEEDED, "% of compute", f"{G1},NVIDIA,1,71:;"),
    "three fields": Bad(RefusalReason.MALFORMED_ANNOTATION, "3 of 4 fields", f"{G1},NVIDIA,1:;"),
    "no number": Bad(RefusalReason.MALFORMED_ANNOTATION, "'1e3'", f"{G1},NVIDIA,1e3,1:;"),
    "over int32": Bad(RefusalReason.MALFORMED_ANNOTATION, "32 bits", f"{G1},NVIDIA,2147483648,1:;"),
    "negative memory": Bad(RefusalReason.MALFORMED_ANNOTATION, "negative", f"{G1},NVIDIA,-1,1:;"),
    "negative compute": Bad(RefusalReason.MALFORMED_ANNOTATION, "negative", f"{G1},NVIDIA,1,-1:;"),
    "wrong type word": Bad(RefusalReason.MALFORMED_ANNOTATION, "type 'MLU'", f"{G1},MLU,1,1:;"),
    "small type word": Bad(
        RefusalReason.MALFORMED_ANNOTATION, "type 'nvidia'", f"{G1},nvidia,1,1:;"
    ),
    "oversize": Bad(
        RefusalReason.MALFORMED_ANNOTATION, f"at most {LENGTH_LIMIT}", ONE + ":" * LENGTH_LIMIT
    ),
    "escapes and line feeds": Bad(
        RefusalReason.MALFORMED_ANNOTATION, "is not a decimal", f"{G1},NVIDIA,\n\x1b[2J\x00 % ü,1:;"
    ),
    "another node's": Bad(RefusalReason.WRONG_NODE, "node-9", node="node-9"),
    "none": Bad(RefusalReason.NO_ANNOTATION, "is missing", None),
    "nothing but separators": Bad(RefusalReason.NO_ANNOTATION, "names no GPU", ";;:"),
    "placeholder of HAMi 2.4": Bad(RefusalReason.NO_ANNOTATION, "names no GPU", ",,0,0:;"),
    "10,000 ids for nobody": Bad(
        RefusalReason.NO_POD_ADMITTED, "asks for 10000 slice(s)", asked=MANY, named=False
    ),
    "10,000 ids for one GPU": Bad(
        RefusalReason.COUNT_MISMATCH, "c0 requests 10000 GPUs", counts=(MANY,), asked=MANY
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_it_is_refused_in_a_sentence_and_nothing_is_written(tmp_path: Path, bad: Bad):
    async with a_kubelet(tmp_path) as kubelet:
        if bad.ill:
            sick = a_shared_gpu(
                gpu=a_gpu(index=0), health=a_health(condition=Condition.BAD, text="XID 79")
            )
            kubelet.desk.inventory.set(an_inventory(gpus=(sick,)))
        kubelet.admit(decode_pod(pod_object(bad.text, *bad.counts, node=bad.node), RESOURCE))
        before, ledger = await kubelet.stored(), kubelet.desk.ledger
        made = dict(kubelet.desk.hooks.made)

        status, text = await kubelet.refused([f"GPU-{number}" for number in range(bad.asked)])

        assert bad.status is status
        assert text.endswith(f" [{bad.gate.value}]")
        assert 1 == len(re.findall(r"HA-\d{4}", text))
        assert bad.words in text
        assert ("team-a/bad" in text) == bad.named
        assert text.isprintable()
        assert len(text) < 700
        assert (before, ledger) == (await kubelet.stored(), kubelet.desk.ledger)
        assert made == kubelet.desk.hooks.made


@pytest.mark.parametrize(
    "containers", [(), ([],), (["GPU-a-0"], [])], ids=["none", "no ids", "one without ids"]
)
async def test_an_empty_request_is_invalid_and_nothing_is_written(tmp_path: Path, containers):
    async with a_kubelet(tmp_path) as kubelet:
        kubelet.admit(decode_pod(pod_object(f"{ONE};"), RESOURCE))
        before = await kubelet.stored()

        status, text = await kubelet.refused(*containers)

        assert Status.INVALID_ARGUMENT is status
        assert "The kubelet requested no slice. [HA-1001]" == text
        assert before == await kubelet.stored()


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
