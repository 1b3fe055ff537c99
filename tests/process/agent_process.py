"""Starting real agents for tests, with nothing of this machine's settings in their environment."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from agent.ledger import LastGood
from agent.sandbox.hardware import described
from agent.sandbox.lab.child import child_environment
from agent.sandbox.lab.cluster import LabOptions, SandboxCluster
from agent.settings.reading import COPY
from agent.state import LAST_GOOD_KIND, unseal

ROOT = Path(__file__).resolve().parents[2]
ENVIRON = child_environment(os.environ)  # noqa: TID251 -- handed on to real processes
PATIENCE = 40.0
"""Seconds for anything that takes one or two on an idle machine."""


def options(*arguments: str, gpus: int = 8) -> LabOptions:
    return LabOptions(described(f"h100:{gpus}"), ENVIRON, arguments=arguments)


async def started(cluster: SandboxCluster, slices: int = 80) -> SandboxCluster:
    """The cluster once its agent offers so many slices, and none that was there before."""
    if cluster.children and cluster.agent.code is not None:
        assert await offers(cluster, 0)  # the kubelet has noticed
    await cluster.start_agent()
    assert await offers(cluster, slices), cluster.log.last(20)
    return cluster


async def offers(cluster: SandboxCluster, slices: int) -> bool:
    return await cluster.until(lambda: cluster.allocatable() == slices, PATIENCE)


async def comes(holds: Callable[[], bool], within: float = PATIENCE) -> bool:
    """Whether it came true in time: nothing tells when a file changes or a thread ends."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while not holds():
        if loop.time() > end:
            return False
        await asyncio.sleep(0.05)
    return True


def copied_settings(cluster: SandboxCluster) -> LastGood | None:
    """The copy of the last good settings, once there is one."""
    copy = cluster.places.state / COPY
    return unseal(copy.read_bytes(), LAST_GOOD_KIND, LastGood) if copy.exists() else None


def run(*arguments: str, within: float = 60) -> subprocess.CompletedProcess[str]:
    """`hami-agent ARGUMENTS`, to its end, which comes within so many seconds."""
    return subprocess.run(  # noqa: S603 -- our own interpreter and arguments
        [sys.executable, "-m", "agent", *arguments],
        cwd=ROOT,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=within,
        check=False,
    )
