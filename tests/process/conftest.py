"""A node that is well."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agent.cluster import REGISTER
from agent.hami.annotations import decode_register
from agent.sandbox.lab.cluster import SandboxCluster, fetch
from tests.process.agent_process import PATIENCE
from tests.process.doctored_node import SLICES, a_node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node_of_module() -> AsyncIterator[SandboxCluster]:
    async with a_node() as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def well(node_of_module: SandboxCluster) -> SandboxCluster:
    """A node on which nothing is wrong, for tests that leave it so.

    The test before may have troubled its agent for a moment.
    """
    cluster = node_of_module

    def is_reported() -> bool:
        report = decode_register(cluster.node_annotations().get(REGISTER, "[]"))
        return cluster.allocatable() == SLICES and all(gpu.healthy for gpu in report)

    async with asyncio.timeout(PATIENCE):
        while True:
            page = await fetch(cluster.web_address or "", "/readyz?verbose")
            if page.status == 200 and "[!]" not in page.text and is_reported():
                return cluster
            await asyncio.sleep(0.1)


@pytest.fixture
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb in this process sets up no log: it would be that of all tests."""
    monkeypatch.setattr("agent.cli.doctor.configure", lambda *_: None)
