"""A node on which an agent serves and nothing is wrong, and what `doctor` says of it."""

import argparse
import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent.cli import doctor
from agent.cluster import HANDSHAKE, REGISTER
from agent.sandbox.apiserver_requests import ACCOUNT_PREFIX
from agent.sandbox.lab.cluster import NODE, SandboxCluster, kubeconfig, open_cluster
from tests.process.agent_process import ENVIRON, PATIENCE, comes, copied_settings, options, started

SLICES = 20
ACCOUNT = f"{ACCOUNT_PREFIX}kube-system:hami-agent"


@contextlib.asynccontextmanager
async def a_node(config: str = "") -> AsyncIterator[SandboxCluster]:
    """A node on which an agent serves and nothing is wrong. `config`: its settings file."""
    hami = Path(__file__).with_name("device-config.yaml")
    async with open_cluster(options("--device-config", str(hami), gpus=2)) as opened:
        if config:
            opened.places.config.write_text(config)
        cluster = await started(opened, SLICES)
        edit(cluster, labels={"gpu": "on"})
        reported = {REGISTER, HANDSHAKE}
        assert await cluster.until(lambda: reported <= cluster.node_annotations().keys(), PATIENCE)
        assert await comes(lambda: is_at_rest(cluster))
        yield cluster


def is_at_rest(cluster: SandboxCluster) -> bool:
    """The start is over: both doors are open, and the copy of the settings has the last label."""
    copy, doors = copied_settings(cluster), cluster.log.of("web.listening", cluster.agent.pid)
    return len(doors) == 2 and copy is not None and "gpu" in (copy.labels or {})


def edit(cluster: SandboxCluster, **metadata: object) -> None:
    def change(node):
        for key, value in metadata.items():
            old = node["metadata"].get(key)
            node["metadata"][key] = {**(old or {}), **value} if isinstance(value, dict) else value
        return node

    cluster.store.update("nodes", "", NODE, change)


def token_of(cluster: SandboxCluster, user: str) -> list[str]:
    """The flag of a kubeconfig of that user."""
    cluster.api.tokens[user] = user
    path = cluster.places.root / "other-kubeconfig"
    path.write_text(kubeconfig(cluster.api.url, user))
    return ["--kubeconfig", str(path)]


async def doctored(cluster: SandboxCluster, *flags: str) -> tuple[int, list[dict]]:
    """The exit code and the findings of `doctor` in this process; a log of its own it has none."""
    parser = argparse.ArgumentParser(prog="hami-agent")
    doctor.add_parser(parser.add_subparsers(dest="verb"))
    args = parser.parse_args(["doctor", *cluster.command()[1:], *flags, "-o", "json"])
    # The verb would set the log of every later test of this process, at its level.
    with (
        pytest.MonkeyPatch.context() as patched,
        capture_logs(),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        patched.setattr(doctor, "configure", lambda *_: None)
        code = await asyncio.to_thread(doctor.main, args, ENVIRON)
    return code, json.loads(printed.getvalue())["data"]["findings"]


def faults(findings: Iterable[dict]) -> list[tuple[str, str]]:
    """What is not ok, without what only follows from a fault."""
    return [
        (one["id"], one["verdict"])
        for one in findings
        if one["verdict"] != "ok" and "(follows from " not in one["said"]
    ]
