"""Measuring a real agent in a sandbox."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from agent.sandbox.hardware import described
from agent.sandbox.lab.child import child_environment
from agent.sandbox.lab.cluster import LabOptions, SandboxCluster, open_cluster
from agent.sandbox.scheduler.model import SchedulerSettings

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 30.0


async def reach(cluster: SandboxCluster, holds: Callable[[], bool]) -> None:
    """Wait for a fact. Raises RuntimeError with the agent's last words."""
    if not await cluster.until(holds, PATIENCE):
        raise RuntimeError("\n".join(["what is measured did not come:", *cluster.log.last(20)]))


@contextlib.asynccontextmanager
async def served(
    gpus: int = 8, split_count: int = 10, *arguments: str
) -> AsyncIterator[SandboxCluster]:
    """A sandbox whose agent serves, watches, has reported and answers on its web door."""
    environ = child_environment(os.environ)  # noqa: TID251 -- handed on to real processes
    options = LabOptions(
        described(f"h100:{gpus}"),
        environ,
        arguments=("--split-count", str(split_count), *arguments),
        scheduler=SchedulerSettings().quick(),  # the agent is measured, and not HAMi's queue
    )
    async with open_cluster(options) as cluster:
        await cluster.start_agent()
        await reach(cluster, lambda: cluster.allocatable() == gpus * split_count)
        await reach(cluster, lambda: cluster.api.open_watches >= 2)
        await reach(cluster, lambda: cluster.api.asked[cluster.user, "patch", "nodes"] >= 1)
        await reach(cluster, lambda: cluster.web_address is not None)
        yield cluster


@contextlib.asynccontextmanager
async def beside(
    module: str, *arguments: str
) -> AsyncIterator[tuple[asyncio.StreamWriter, asyncio.StreamReader]]:
    """A program of ours in a process of its own, until the block is left: what it is told, says."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdin, process.stdout
    finally:
        process.kill()
        await process.wait()


# The agent as operators have it: installed from its wheel, with compiled bytecode.

PLACE = ROOT / "build" / "bench" / "venv"


def install() -> Path:
    """Install what this checkout is, and the locked packages, as systemd/install does; its command.

    Raises subprocess.CalledProcessError: uv or the compiler refuses, and has said why.
    """
    # Copied: what other environments have mapped, too, could not be dropped from the page cache.
    named = {"UV_PROJECT_ENVIRONMENT": str(PLACE), "UV_LINK_MODE": "copy"}
    environ = os.environ | named  # noqa: TID251 -- handed on
    sync = "sync --quiet --locked --no-editable --no-dev --reinstall-package=hami-agent"
    compiled = "-I -m compileall -q -f --invalidation-mode unchecked-hash"
    for command in (
        [str(ROOT / ".venv/bin/uv"), *sync.split()],
        [str(PLACE / "bin/python"), *compiled.split(), str(PLACE / "lib")],
    ):
        subprocess.run(command, cwd=ROOT, env=environ, check=True)  # noqa: S603 -- our own tools
    program = PLACE / "bin" / "hami-agent"
    first, _, rest = program.read_text().partition("\n")
    program.write_text(f"{first} -IXfaulthandler\n{rest}")
    return program
