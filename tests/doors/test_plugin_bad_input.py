"""Bad input at the kubelet's door, with the real allocation and its ledger behind it.

Each is answered with its gRPC status, one sentence and the short id of the runbook; nothing is
written, and the door goes on answering others. Where only the kubelet's ids are odd, they are
counted and the container is served.
"""

import asyncio
import contextlib
import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from grpclib import GRPCError
from grpclib.client import Channel
from grpclib.const import Status
from h2.config import H2Configuration
from h2.connection import H2Connection

from agent.cluster import PodView
from agent.errors import RefusalReason
from agent.hami.annotations import LENGTH_LIMIT
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
from tests.fakes.door import RESOURCE, a_door, a_list
from tests.fakes.grpc_messages import GrpcPlugin
from tests.fakes.raw_h2 import a_raw_call, prefixed
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
        "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]},
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
        server = PluginServer(directory, Cell(RESOURCE), lists, Seeded(0))
        server.allocator = desk.service
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
        "not an integer from",
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
    "10,000 ids": (RefusalReason.COUNT_MISMATCH, "c0 requests 10000 GPUs", ONE + ";", MANY),
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


# The kubelet's door opens to the kubelet alone, and a peer that floods it keeps nobody out.


NOBODY = 65534
PATIENCE = 10.0
ALLOCATE = "/v1beta1.DevicePlugin/Allocate"
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", ALLOCATE),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
CALL = """
import os, socket, sys
os.setresuid(*3 * [int(sys.argv[2])])
with socket.socket(socket.AF_UNIX) as caller:
    caller.settimeout(30)
    caller.connect(sys.argv[1])
    try:
        settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
        caller.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + settings)
        while told := caller.recv(4096):
            print("told", told)
    except ConnectionError:
        pass
    print("hung up")
"""


@pytest.fixture
def passable() -> Iterator[Path]:
    """A directory that everybody may pass through, as no test's own is."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o711)
        yield Path(made)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can call as somebody else")
async def test_another_user_is_hung_up_on_whatever_the_mode_of_the_socket(passable: Path):
    async with a_door(passable) as door:
        door.path.chmod(0o666)

        done = await asyncio.to_thread(
            subprocess.run,
            # Nobody could write what a measurement of coverage, which comes with site, has found.
            [sys.executable, "-S", "-c", CALL, str(door.path), str(NOBODY)],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

        assert ("hung up\n", "") == (done.stdout, done.stderr)
        assert [] == door.allocator.asked
        await is_served(door.path)


async def test_a_flood_of_calls_that_are_reset_at_once_keeps_nobody_out(tmp_path: Path):
    """The pattern of CVE-2023-44487, on several connections."""
    connection = H2Connection(H2Configuration())
    connection.initiate_connection()
    for number in range(500):
        connection.send_headers(2 * number + 1, HEADERS)
        connection.reset_stream(2 * number + 1)
    connection.ping(b"are you?")
    sent = connection.data_to_send()
    async with a_door(tmp_path) as door:
        for _ in range(4):
            reader, writer = await asyncio.open_unix_connection(str(door.path))
            writer.write(sent)
            async with asyncio.timeout(PATIENCE):
                while b"are you?" not in await reader.read(65_536):
                    pass
            writer.close()

        await is_served(door.path)


async def test_a_peer_that_dies_in_a_call_leaves_no_error_behind(tmp_path: Path):
    """As a kubelet that is killed while it takes our lists."""
    heard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, said: heard.append(said))
    async with a_door(tmp_path) as door:
        for _ in range(3):
            async with a_raw_call(door.path) as call:
                await call.request("/v1beta1.DevicePlugin/ListAndWatch", prefixed(b""))
                while not call.body:
                    await call.read()
            async with asyncio.timeout(PATIENCE):
                await door.server.streams.until(lambda count: count == 0)
        gc.collect()
        await asyncio.sleep(0)

    assert [] == heard


async def test_bytes_that_are_no_http_2_end_that_connection_alone(tmp_path: Path):
    async with a_door(tmp_path) as door:
        for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, prefixed(b"x" * 9)):
            await hung_up(door.path, noise)

        await is_served(door.path)


async def hung_up(path: Path, sent: bytes = b"") -> None:
    """Wait until the agent has closed a connection on which this was sent."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(sent)
    async with asyncio.timeout(PATIENCE):
        while await reader.read(4096):
            pass
    writer.close()


async def is_served(path: Path) -> None:
    """The kubelet's own calls are answered."""
    plugin = GrpcPlugin(path)
    answer = await asyncio.to_thread(plugin.allocate, ["a"])
    assert 1 == len(answer.container_responses)
    plugin.close()
