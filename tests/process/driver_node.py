"""A whole agent in plain mode on the real pynvml and a library of ours, for tests."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc

from agent.sandbox.lab.child import start_child
from agent.sandbox.lab.cluster import SandboxCluster, open_cluster
from tests.fakes.grpc_messages import GrpcPlugin
from tests.fakes.nvml_stub import NvmlStub
from tests.process.agent_process import PATIENCE, offers, options

LIMIT = 2.0
GPUS = 3
SLICES = [f"GPU-5708-{gpu}-{number}" for number in range(10) for gpu in range(GPUS)]


@dataclass
class DriverNode:
    """A node whose agent uses the stub's GPUs."""

    cluster: SandboxCluster
    stub: NvmlStub
    plugin: GrpcPlugin

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
        """A page of the agent's web door. A test that claims how soon it comes measures that."""
        async with (
            asyncio.timeout(PATIENCE),
            aiohttp.ClientSession(self.cluster.web_address) as session,
            session.get(path) as answer,
        ):
            return answer.status, await answer.text()


@contextlib.asynccontextmanager
async def a_cluster() -> AsyncIterator[SandboxCluster]:
    """A cluster in plain mode without an agent."""
    async with open_cluster(options("--scheduler", "none", gpus=1)) as cluster:
        cluster.places.config.write_text(
            f"health:\n  driverHang: {LIMIT:g}s\n  probePeriod: 500ms\n"
        )
        yield cluster


async def start(cluster: SandboxCluster, library: Path) -> None:
    """Start an agent that uses the library at that path, which may come later."""
    command = list(cluster.command())
    simulate = command.index("--simulate")
    command[simulate : simulate + 2] = ["--nvml-library", str(library)]
    child = await start_child(command, cluster.environment(), cluster.log)
    cluster.children.append(child)
    cluster.tasks.create_task(child.read())


@contextlib.asynccontextmanager
async def a_node(library: Path) -> AsyncIterator[DriverNode]:
    """A node whose agent uses the library at that path and offers the slices of its GPUs."""
    stub = NvmlStub(library)
    stub.set(2, memory=16 << 30)
    stub.order(range(GPUS))
    async with a_cluster() as cluster:
        await start(cluster, library)
        assert await offers(cluster, 10 * GPUS), cluster.log.last(20)
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        (socket,) = {path.name for path in cluster.places.plugins.glob("*.sock")} - {"kubelet.sock"}
        plugin = GrpcPlugin(cluster.places.plugins / socket)
        try:
            yield DriverNode(cluster, stub, plugin)
        finally:
            stub.hang(hung=False)
            plugin.close()
