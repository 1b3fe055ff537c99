"""A whole agent on the real pynvml and a library of ours that hangs: the agent never does."""

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from agent.sandbox.lab.child import start_child
from agent.sandbox.lab.cluster import SandboxCluster, open_cluster
from agent.sandbox.lab.web import fetch
from tests.fakes import nvml_stub
from tests.fakes.grpc_messages import Plugin
from tests.fakes.nvml_stub import NvmlStub
from tests.process.agent_process import PATIENCE, offers, options

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(120)]

HANG = 20.0
LIMIT = 2.0
PROBE = 1.0
"""Seconds within which every probe is answered."""
GPUS = 3
SLICES = [f"GPU-5708-{gpu}-{number}" for number in range(10) for gpu in range(GPUS)]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


@dataclass
class Node:
    """A node whose agent uses the stub's GPUs."""

    cluster: SandboxCluster
    stub: NvmlStub
    plugin: Plugin

    @property
    def threads(self) -> int:
        """Threads of the agent's process."""
        text = Path(f"/proc/{self.cluster.agent.pid}/status").read_text(encoding="ascii")
        found = re.search(r"^Threads:\s+(\d+)$", text, re.MULTILINE)
        assert found is not None
        return int(found[1])

    async def allocate(self, slice_id: str) -> str:
        """Empty when the kubelet's question for this slice is answered, else what is said."""
        try:
            await asyncio.to_thread(self.plugin.allocate, [slice_id])
        except grpc.RpcError as error:
            return str(error.details())
        return ""

    async def page(self, path: str) -> tuple[int, str]:
        """A page of the agent's web door, in time."""
        async with asyncio.timeout(PROBE):
            page = await fetch(self.cluster.web_address or "", path)
        return page.status, page.text


@contextlib.asynccontextmanager
async def a_node(library: Path, *arguments: str) -> AsyncIterator[Node]:
    """A node in plain mode, whose agent uses the library at that path and offers all slices."""
    stub = NvmlStub(library)
    stub.set(2, memory=16 << 30)
    async with open_cluster(options("--scheduler", "none", gpus=1)) as cluster:
        cluster.places.config.write_text(f"health:\n  driverHang: {LIMIT:g}\n  probePeriod: 0.5\n")
        command = list(cluster.command())
        simulate = command.index("--simulate")
        command[simulate : simulate + 2] = ["--nvml-library", str(library)]
        child = await start_child([*command, *arguments], cluster.environment(), cluster.log)
        cluster.children.append(child)
        cluster.tasks.create_task(child.read())
        assert await offers(cluster, 10 * GPUS), cluster.log.last(20)
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        (socket,) = {path.name for path in cluster.places.plugins.glob("*.sock")} - {"kubelet.sock"}
        plugin = Plugin(cluster.places.plugins / socket)
        try:
            yield Node(cluster, stub, plugin)
        finally:
            stub.hang(hung=False)
            plugin.close()


async def comes(holds: Callable[[], bool], within: float = PATIENCE) -> bool:
    """Whether it came true in time: nothing tells when a thread ends."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while not holds():
        if loop.time() > end:
            return False
        await asyncio.sleep(0.05)
    return True


@dataclass
class Watched:
    """What was seen of an agent whose driver hung. `refused_at`: seconds after it began to."""

    answered: int = 0
    refused_at: float | None = None
    refusal: str = ""
    most_threads: int = 0
    ready: set[int] = field(default_factory=set)


async def watch(node: Node, seconds: float) -> Watched:
    """Ask the agent everything again and again: pages in time, slices until one is refused."""
    seen, loop = Watched(), asyncio.get_running_loop()
    begun = loop.time()
    while loop.time() - begun < seconds:
        live, words = await node.page("/livez")
        assert 200 == live, words
        seen.ready.add((await node.page("/readyz"))[0])
        if seen.refused_at is None:
            seen.refusal = await node.allocate(SLICES[1 + seen.answered])
            seen.answered += not seen.refusal
            seen.refused_at = loop.time() - begun if seen.refusal else None
        seen.most_threads = max(seen.most_threads, node.threads)
        await asyncio.sleep(0.3)
    return seen


async def test_a_library_that_hangs_for_20_s_holds_up_no_page_and_refuses_with_the_reason(
    built, tmp_path
):
    library = Path(shutil.copy(built, tmp_path / "libnvidia-ml.so.1"))
    async with a_node(library) as node:
        assert "" == await node.allocate(SLICES[0])
        assert await comes(lambda: node.stub.inside == 0)
        threads = node.threads
        node.stub.hang()
        seen = await watch(node, HANG)

        assert seen.answered >= 3
        assert seen.refused_at is not None
        assert LIMIT <= seen.refused_at
        assert "The driver has not answered for GPU" in seen.refusal
        assert "HA-4005" in seen.refusal
        assert 0 == node.cluster.allocatable()
        assert seen.most_threads <= threads + GPUS + 2  # the driver's own, and a slow one's

        node.stub.hang(hung=False)
        assert await offers(node.cluster, 10 * GPUS), node.cluster.log.last(20)
        assert "" == await node.allocate(SLICES[-1])
        assert await comes(lambda: node.stub.inside == 0)
        assert await comes(lambda: node.threads <= threads), (threads, node.threads)
        assert 0 == await node.cluster.stop_agent()
    assert (0, 0) == (node.stub.sessions, node.stub.sets)


async def test_a_gpu_that_hangs_leaves_the_others_served(built, tmp_path):
    library = Path(shutil.copy(built, tmp_path / "libnvidia-ml.so.1"))
    async with a_node(library) as node:
        threads = node.threads
        node.stub.hang(slot=1)

        assert await offers(node.cluster, 10 * (GPUS - 1)), node.cluster.log.last(20)
        assert "" == await node.allocate("GPU-5708-0-0")
        assert "HA-4005" in await node.allocate("GPU-5708-1-0")
        assert "" == await node.allocate("GPU-5708-2-0")
        assert node.threads <= threads + 2

        node.stub.hang(slot=1, hung=False)
        assert await offers(node.cluster, 10 * GPUS), node.cluster.log.last(20)
        assert "" == await node.allocate("GPU-5708-1-0")


async def test_an_xid_of_the_library_takes_the_slices_of_its_gpu_away(built, tmp_path):
    library = Path(shutil.copy(built, tmp_path / "libnvidia-ml.so.1"))
    async with a_node(library) as node:
        node.stub.xid(2, 48)

        assert await offers(node.cluster, 10 * (GPUS - 1)), node.cluster.log.last(20)
        assert "XID 48" in await node.allocate("GPU-5708-2-0")
        assert "" == await node.allocate("GPU-5708-0-0")
