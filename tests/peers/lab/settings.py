"""An agent with settings files, and the way from an edit to kubelet and scheduler."""

import asyncio
import signal
from typing import Final

from tests.peers.lab.agents import Agent
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.config_files import NODE_CONFIG, Files, node_config, open_files
from tests.peers.lab.node_state import until_allocatable
from tests.peers.lab.report import Told, until_told
from tests.peers.lab.table import FAR, Table

BOUND: Final = 2.0
"""Seconds from an edit to its effect; the agent spreads the writes of many nodes over one."""

QUIET: Final = 3.0
"""Seconds in which a write that is one too many would be there."""

ALL: Final = Told(gpus=8, count=10)
"""What an agent without settings tells."""


def ask_to_reload(agent: Agent) -> None:
    """SIGHUP, for who does not wait for the agent to look."""
    agent.part.send(signal.SIGHUP)


async def with_node_config(cluster: Cluster, count: int) -> tuple[Agent, Files]:
    """A registered agent to which HAMi's config.json says a split count; and where that lies."""
    files = open_files(cluster)
    path = files.write(NODE_CONFIG, node_config(devicesplitcount=count))
    agent = await cluster.start_registered_agent("--nodeconfig", str(path), slices=8 * count)
    return agent, files


async def until_everywhere(
    cluster: Cluster, table: Table, wanted: Told, began: float, what: str
) -> None:
    """Return once kubelet and Node know; how long both took since `began` is in the table.

    `began` is a moment of the loop's clock.

    Raises:
        TimeoutError, AssertionError: one of them took far too long.
    """
    loop = asyncio.get_running_loop()
    await until_allocatable(cluster, wanted.gpus * wanted.count, FAR * BOUND)
    table.hold(f"{what} → allocatable slices", loop.time() - began, BOUND)
    at = await until_told(cluster, wanted, began, FAR * BOUND)
    table.hold(f"{what} → register annotation", at - began, BOUND)
