"""A simulated node in trouble: pods of all kinds, a GPU that is cordoned, and a refusal."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from agent.cluster import CORDON
from agent.sandbox.lab.cluster import NODE, SandboxCluster, fetch, open_cluster
from agent.sandbox.scenario.facts import is_running
from agent.sandbox.scenario.stage import PLACED, plain
from agent.sandbox.store import Json
from tests.process.agent_process import PATIENCE, options, started

GPUS: Final = 4
STRAY: Final = "stray"
LOOK: Final = 0.2


@contextlib.asynccontextmanager
async def open_node() -> AsyncIterator[SandboxCluster]:
    """The node, once its agent shows all of this."""
    async with open_cluster(options(gpus=GPUS)) as cluster:
        await started(cluster, slices=10 * GPUS)
        for workload in (*PLACED, plain("notebook"), plain("web")):
            cluster.submit(workload.pod())
            running = partial(is_running, cluster, workload.name)
            assert await cluster.until(running, PATIENCE), workload.name
        uuid = cluster.hardware.states[2].gpu.uuid
        cluster.store.update("nodes", "", NODE, partial(_cordoned, uuid=uuid))
        # Its author binds it to the node himself: the agent refuses it.
        stray = plain(STRAY).pod()
        stray["spec"]["nodeName"] = NODE
        cluster.store.create("pods", stray)
        assert await shows(cluster, f"/{STRAY} ")
        assert await shows(cluster, "cordoned")
        yield cluster


async def shows(cluster: SandboxCluster, text: str) -> bool:
    """Whether the page comes to hold the text."""
    assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
    end = asyncio.get_running_loop().time() + PATIENCE
    while text not in (await fetch(cluster.web_address or "", "/")).text:
        if asyncio.get_running_loop().time() > end:
            return False
        await asyncio.sleep(LOOK)
    return True


def _cordoned(node: Json, uuid: str) -> Json:
    node["metadata"].setdefault("annotations", {})[CORDON] = uuid
    return node
