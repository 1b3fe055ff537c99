"""Measuring a real agent in a sandbox."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from agent.sandbox.hardware import described
from agent.sandbox.lab.child import child_environment
from agent.sandbox.lab.cluster import LabOptions, SandboxCluster, open_cluster
from agent.sandbox.scheduler.model import SchedulerSettings
from tests.bench.allocates import under_load
from tests.bench.figures import Figure
from tests.fakes import nvml_stub

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 30.0
SETTLED = 2.0
"""Seconds after which nothing of the start is under way any more."""
CALM = 12.0
"""Seconds after which an agent that has served pods is at rest, too."""
PODS = 30
GPUS = 8


async def reach(
    cluster: SandboxCluster, holds: Callable[[], bool], within: float = PATIENCE
) -> None:
    """Wait for a fact. Raises RuntimeError with the agent's last words."""
    if not await cluster.until(holds, within):
        raise RuntimeError("\n".join(["what is measured did not come:", *cluster.log.last(20)]))


async def next_list(cluster: SandboxCluster, seen: int) -> float:
    """When the next list came, after `seen` of them."""
    history = cluster.kubelet.history
    await reach(cluster, lambda: len(history.of("listed")) > seen)
    return history.of("listed")[-1].elapsed


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
        await reach(cluster, lambda: cluster.api.journal.watches(cluster.user) >= 2)
        await reach(cluster, lambda: cluster.api.journal.writes(cluster.user) >= 1)
        await reach(cluster, lambda: cluster.web_address is not None)
        yield cluster


@contextlib.asynccontextmanager
async def with_library() -> AsyncIterator[SandboxCluster]:
    """A sandbox as served() opens it; its GPUs are those of a stand-in for NVIDIA's library."""
    with tempfile.TemporaryDirectory() as folder:
        library = nvml_stub.build(Path(folder))
        stub = nvml_stub.NvmlStub(library)
        for slot in range(GPUS):
            stub.set(slot, memory=80 << 30)
        stub.order(range(GPUS))
        async with served(GPUS, 10, "--simulate", "", "--nvml-library", str(library)) as cluster:
            yield cluster


async def restarts(runs: int) -> list[Figure]:
    """SIGKILL → serving, and a new kubelet's socket → Register and list."""
    killed: list[float] = []
    registers: list[float] = []
    lists: list[float] = []
    async with served() as cluster:
        history = cluster.kubelet.history
        loop = asyncio.get_running_loop()
        for _ in range(runs):
            begun, seen = loop.time(), len(history.of("listed"))
            await cluster.kill_agent()
            await cluster.start_agent()
            killed.append((await next_list(cluster, seen) - begun) * 1000)
        for _ in range(runs):
            seen = len(history.of("listed"))
            await cluster.kubelet.restart()
            listed = await next_list(cluster, seen)
            up = history.of("started")[-1].elapsed
            registers.append((history.of("registered")[-1].elapsed - up) * 1000)
            lists.append((listed - up) * 1000)
    socket = "from the moment that the kubelet model serves its sockets"
    return [
        Figure(
            "kill_to_serving",
            "SIGKILL → serving again",
            "ms",
            killed,
            "from the signal to the next list at the kubelet model, the new exec included",
            500,
        ),
        Figure("socket_to_register", "kubelet socket → Register", "ms", registers, socket, 300),
        Figure("socket_to_list", "kubelet socket → allocatable", "ms", lists, socket, 1000),
    ]


@contextlib.asynccontextmanager
async def reader(cluster: SandboxCluster) -> AsyncIterator[asyncio.StreamReader]:
    (socket,) = (
        path for path in cluster.places.plugins.glob("*.sock") if path.name != "kubelet.sock"
    )
    async with beside("tests.bench.reader", str(socket)) as (_, lists):
        yield lists


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


async def next_line(lists: asyncio.StreamReader) -> float:
    """When the next list came to the reader."""
    async with asyncio.timeout(PATIENCE):
        return float((await lists.readline()).split()[0])


async def allocates(_: int) -> list[Figure]:
    """Allocates under other circumstances."""
    async with served() as cluster:
        return await under_load(cluster, PODS)


# The agent as operators have it: installed from its wheel, with compiled bytecode.

PLACE = ROOT / "build" / "bench" / "venv"


def install() -> Path:
    """Install what this checkout is, and the locked packages, as systemd/install does; its command.

    Raises subprocess.CalledProcessError: uv or the compiler refuses, and has said why.
    """
    # Copied: what other environments have mapped, too, could not be dropped from the page cache.
    named = {"UV_PROJECT_ENVIRONMENT": str(PLACE), "UV_LINK_MODE": "copy"}
    environ = os.environ | named  # noqa: TID251 -- handed on
    _run_installed(
        *(str(ROOT / ".venv/bin/uv"), "sync", "--quiet", "--locked", "--no-editable", "--no-dev"),
        "--reinstall-package=hami-agent",
        env=environ,
    )
    compiler = (str(PLACE / "bin/python"), "-I", "-m", "compileall", "-q", "-f")
    _run_installed(*compiler, "--invalidation-mode", "unchecked-hash", str(PLACE / "lib"), env={})
    command = PLACE / "bin" / "hami-agent"
    first, _, rest = command.read_text().partition("\n")
    command.write_text(f"{first} -IXfaulthandler\n{rest}")
    return command


def _run_installed(*command: str, env: Mapping[str, str]) -> None:
    subprocess.run(command, cwd=ROOT, env=env, check=True)  # noqa: S603 -- our own tools


def files() -> list[Path]:
    """All files that a start may read: the installation's, and those of the interpreter."""
    interpreter = (PLACE / "bin" / "python").resolve().parents[1]
    version = next((PLACE / "lib").iterdir()).name
    places = (PLACE, interpreter / "bin", interpreter / "lib" / version)
    found = [path for place in places for path in place.rglob("*") if path.is_file()]
    return [*found, *(interpreter / "lib").glob("*.so*")]


def chill(paths: list[Path]) -> None:
    """Drop these files from the page cache; pages that a running process has mapped stay.

    Raises OSError: one cannot be opened.
    """
    os.sync()  # what is not on disk yet cannot be dropped
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
