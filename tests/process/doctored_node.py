"""A node on which an agent serves and nothing is wrong, and what `doctor` says of it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable

from agent.core.cluster.annotations import HANDSHAKE, REGISTER
from agent.sandbox.apiserver_access import ACCOUNT_PREFIX
from agent.sandbox.lab.cluster import NODE, SandboxCluster, kubeconfig, open_cluster
from tests.process.agent_process import PATIENCE, options, run, started

SLICES = 20
ACCOUNT = f"{ACCOUNT_PREFIX}kube-system:hami-agent"


@contextlib.asynccontextmanager
async def a_node(config: str = "") -> AsyncIterator[SandboxCluster]:
    """A node on which an agent serves and nothing is wrong. `config`: its settings file."""
    async with open_cluster(options(gpus=2)) as opened:
        if config:
            opened.places.config.write_text(config)
        cluster = await started(opened, SLICES)
        edit(cluster, labels={"gpu": "on"})
        reported = {REGISTER, HANDSHAKE}
        assert await cluster.until(lambda: reported <= cluster.node_annotations().keys(), PATIENCE)
        yield cluster


def edit(cluster: SandboxCluster, **metadata: object) -> None:
    def change(node):
        for key, value in metadata.items():
            old = node["metadata"].get(key)
            node["metadata"][key] = {**(old or {}), **value} if isinstance(value, dict) else value
        return node

    cluster.store.update("nodes", "", NODE, change)


def token_of(cluster: SandboxCluster, user: str) -> list[str]:
    """The flag of a kubeconfig of that user."""
    cluster.api._tokens[user] = user
    path = cluster.places.root / "other-kubeconfig"
    path.write_text(kubeconfig(cluster.api.url, user))
    return ["--kubeconfig", str(path)]


async def doctored(cluster: SandboxCluster, *flags: str) -> tuple[int, list[dict]]:
    """The exit code and the findings."""
    ended = await asyncio.to_thread(run, "doctor", *cluster.command()[1:], *flags, "-o", "json")
    assert "" == ended.stderr
    return ended.returncode, json.loads(ended.stdout)["findings"]


def faults(findings: Iterable[dict]) -> list[tuple[str, str]]:
    """What is not ok, without what only follows from a fault."""
    return [
        (one["id"], one["verdict"])
        for one in findings
        if one["verdict"] != "ok" and "(follows from " not in one["said"]
    ]


def line(findings: Iterable[dict], point: str) -> dict:
    (found,) = [one for one in findings if one["id"] == point and one["verdict"] != "ok"]
    return found
