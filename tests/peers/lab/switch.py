"""A node's switch between HAMi's plugin and the agent, step by step.

What the plugin's stand-in does is in lab/hami_plugin.py.
"""

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Final, Literal

from agent.cluster import Role
from tests.peers.lab.agents import RESOURCE, SOURCE, Agent
from tests.peers.lab.agreement import Container, rows
from tests.peers.lab.clockwork import wall
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.grants import SeenGrant, grants
from tests.peers.lab.identities import ADMIN, NODE
from tests.peers.lab.part import Part
from tests.peers.lab.pods import as_seen, key, lives
from tests.peers.lab.waiting import until, until_answer

MANAGER: Final = "nvidia-device-plugin"
"""Who writes, as the API server notes it."""
BACK: Final = 2.0
"""Seconds that a node may be without slices."""
WITHIN: Final = 30.0
"""Seconds for what takes one or two on a quiet machine."""

Shares = dict[Container, list[SeenGrant]]
Manner = Literal["stopped", "killed", "beside"]
"""How HAMi's plugin ends; beside: when the agent serves already."""


@contextlib.asynccontextmanager
async def open_hami_plugin(cluster: Cluster) -> AsyncIterator[Part]:
    """HAMi's plugin, which serves the node with 80 slices; ended afterwards.

    Raises:
        OSError, TimeoutError: it does not start.
    """
    command = (
        *(sys.executable, "-m", "tests.peers.lab.hami_plugin", "--node", NODE, "--gpus", "h100:8"),
        *("--kubeconfig", str(cluster.plane.kubeconfig(ADMIN))),
        *("--lock", lock_directory(cluster), "--manager", MANAGER),
        *(("--old",) if cluster.release.is_old else ()),
    )
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
    logs = cluster.root / "logs"
    part = Part("hami-plugin", command, logs, space=cluster.space, environment=environment)
    part.log.unlink(missing_ok=True)
    await part.start()
    try:
        await until_serving(cluster, part)
        yield part
    finally:
        await part.stop()


def lock_directory(cluster: Cluster) -> str:
    """What stands for the host's /tmp/vgpulock, which is outside of the node's space."""
    return str(cluster.root / "vgpulock")


async def until_serving(cluster: Cluster, plugin: Part) -> None:
    """Return once the kubelet and the Node have what HAMi's plugin says. Raises TimeoutError."""
    await until_answer(lambda: offers(cluster, 80), WITHIN, plugin.tail)
    await cluster.nodes.until(cluster.is_sharing, WITHIN, "the Node has no slices")


async def offers(cluster: Cluster, slices: int) -> bool:
    """Whether the kubelet answers and counts so many healthy slices."""
    return await cluster.kubelet.offers(RESOURCE, slices)


def promised(cluster: Cluster, names: Iterable[str]) -> Shares:
    """What the scheduler wrote for each container with GPUs of those pods, but init containers."""
    return {
        (key(name), container): sorted(given, key=str)
        for name in names
        for container, given in grants(as_seen(cluster, name)).items()
        if given and container in lives(as_seen(cluster, name))
    }


def booked(cluster: Cluster) -> tuple[Shares, dict[Container, frozenset[str]]]:
    """The same, as the ledger on disk has it, confirmed; and the ids of each. Raises OSError."""
    found = {who: row for who, row in rows(cluster).items() if row.role is not Role.INIT}
    shares = {
        who: sorted(
            (SeenGrant(one.uuid, one.memory_mib, one.core_percent) for one in row.shares), key=str
        )
        for who, row in found.items()
        if row.confirmed
    }
    return shares, {who: frozenset(row.slice_ids) for who, row in found.items()}


async def until_adopted(cluster: Cluster, agent: Agent, names: Iterable[str]) -> None:
    """Return once the ledger has the rows of those pods and no others. Raises TimeoutError."""
    wanted = promised(cluster, names)

    def are_rows() -> bool:
        try:
            return booked(cluster)[0] == wanted
        except FileNotFoundError:
            return False

    await until(are_rows, WITHIN, agent.part.tail)


async def hand_over(
    cluster: Cluster, theirs: Part, manner: Manner = "stopped"
) -> tuple[Agent, float]:
    """The agent in the place of HAMi's plugin; with the seconds for which slices were away.

    Raises:
        OSError, TimeoutError: it does not come so far.
    """
    if manner == "beside":
        agent = await cluster.start_agent("--takeover")
        await until(lambda: bool(agent.events("registration.serving")), WITHIN, agent.part.tail)
        assert await offers(cluster, 80)
        began = wall()
        await theirs.stop()
        # Up to kubelet 1.36 the end of the one stream is that of both.
        await until(lambda: len(agent.events("registration.serving")) > 1, WITHIN, agent.part.tail)
    else:
        began = wall()
        await (theirs.kill() if manner == "killed" else theirs.stop())
        agent = await cluster.start_agent()
    await until_answer(lambda: offers(cluster, 80), WITHIN, agent.part.tail)
    return agent, wall() - began


def allocated(plugin: Part) -> list[str]:
    """The pods that HAMi's plugin has served, in order."""
    lines = map(json.loads, plugin.said().splitlines())
    return [line["pod"] for line in lines if line["event"] == "allocated"]
