"""Prints which files of the agent an Allocate, an XID and a scrape go through: `make walk`.

The whole agent runs in this process, on the models of agent/sandbox and on the C stub of NVML. What
a model calls in the agent's files does not count, nor do files that every walk rests on (LEFT_OUT).
Each walk is made TIMES times, and each time compared with a window of the same length in which
nothing happens. A file counts if most of the walks enter it and their windows do not.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import FrameType

from agent.app.main import run_agent
from agent.cli import run
from agent.cli.config import sources, started
from agent.cluster import BIND_PHASE, MUTEX_LOCK, REGISTER
from agent.kit.logs import configure
from agent.sandbox.hardware import described
from agent.sandbox.lab.child import child_environment
from agent.sandbox.lab.cluster import (
    NAMESPACE,
    RESOURCE,
    LabOptions,
    SandboxCluster,
    fetch,
    free_port,
    open_cluster,
)
from tests.fakes import nvml_stub
from tests.fakes.nvml_stub import NvmlStub
from tests.shape.tree import ROOT

TIMES = 5
QUIET = 2.0
"""Seconds after a walk until what it has set off is over."""
ECHO = 0.2
"""Seconds after what an XID has changed, in which the agent's own watch brings the change back."""
PATIENCE = 40.0
MODELS = f"{ROOT}/agent/sandbox/"
LEFT_OUT = (
    MODELS,
    *(f"{ROOT}/agent/{room}/" for room in ("kit", "wire")),
    *(f"{ROOT}/agent/{file}.py" for file in ("errors", "model", "cluster")),
)
"""The models, building blocks, messages, errors, and the values of GPUs, slices and pods."""


class Trail:
    """The agent's files that were entered, on any thread, since `clear`."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self.began = 0.0

    def enter(self, frame: FrameType, event: str, _: object) -> None:
        """Note the file of a call; the function for sys.setprofile."""
        file = frame.f_code.co_filename
        if event != "call" or file in self._files or not file.startswith(f"{ROOT}/agent/"):
            return
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code.co_filename.startswith(MODELS):
                return
            caller = caller.f_back
        self._files.add(file)

    def clear(self) -> None:
        """Begin anew."""
        self._files.clear()
        self.began = asyncio.get_running_loop().time()

    @property
    def files(self) -> set[str]:
        """The entered files that count, relative to the root."""
        return {
            file.removeprefix(f"{ROOT}/") for file in self._files if not file.startswith(LEFT_OUT)
        }


@contextlib.asynccontextmanager
async def a_node(trail: Trail) -> AsyncIterator[tuple[SandboxCluster, NvmlStub]]:
    """The models, and an agent in this loop that has come to rest."""
    options = LabOptions(
        described(f"h100:{TIMES + 1}"),
        child_environment(os.environ),  # noqa: TID251 -- as for an agent of its own
        web_port=free_port(),
    )
    async with open_cluster(options) as cluster, asyncio.TaskGroup() as group:
        library = nvml_stub.build(cluster.places.root)
        stub = NvmlStub(library)
        stub.set(2, memory=16 << 30)
        stub.order(range(TIMES + 1))
        arguments = list(cluster.command())
        simulate = arguments.index("--simulate")
        arguments[simulate : simulate + 2] = ["--nvml-library", str(library)]
        threading.setprofile(trail.enter)
        sys.setprofile(trail.enter)
        agent = group.create_task(run_here(arguments, cluster.environment()))
        if not await cluster.until(lambda: cluster.allocatable() == 10 * (TIMES + 1), PATIENCE):
            raise TimeoutError("the agent did not offer its slices")
        await asyncio.sleep(4 * QUIET)  # the start is over
        yield cluster, stub
        sys.setprofile(None)
        threading.setprofile(None)
        agent.cancel()


async def run_here(arguments: list[str], environ: dict[str, str]) -> None:
    """`hami-agent run` in this loop."""
    parser = argparse.ArgumentParser()
    run.add_parser(parser.add_subparsers())
    origin = sources(parser.parse_args(arguments), environ)
    start = await started(origin)
    settings = start.taken().settings()
    configure(settings.log_level, settings.log_format, environ)
    await run_agent(origin, start, settings)


Walk = Callable[[int], Awaitable[None]]


async def walked(trail: Trail, walk: Walk) -> list[str]:
    """The files that most of the walks enter, and a window of the same length does not."""
    found = Counter[str]()
    loop = asyncio.get_running_loop()
    for number in range(TIMES):
        trail.clear()
        await walk(number)
        took, entered = loop.time() - trail.began, trail.files
        await asyncio.sleep(QUIET)
        trail.clear()
        await asyncio.sleep(took)
        found.update(entered - trail.files)
    return sorted(file for file, times in found.items() if times > TIMES / 2)


async def main() -> list[tuple[str, list[str]]]:
    """What is walked, and its files."""
    trail = Trail()
    async with a_node(trail) as (cluster, stub):

        async def until(holds: Callable[[], bool]) -> None:
            if not await cluster.until(holds, PATIENCE):
                raise TimeoutError("what is walked did not end")

        async def allocate(number: int) -> None:
            """From the kubelet's call until the pod's phase is written and the lock is gone."""
            name, history = f"walk-{number}", cluster.kubelet.history
            asked = len(history.of("allocating"))
            limits = {RESOURCE: "1", f"{RESOURCE}mem": "500"}
            box = {"name": "main", "image": "x", "resources": {"limits": limits}}
            meta = {"name": name, "namespace": NAMESPACE, "annotations": {}}
            cluster.submit({"metadata": meta, "spec": {"containers": [box]}})
            await until(lambda: len(history.of("allocating")) > asked)
            trail.clear()

            def is_settled() -> bool:
                notes = cluster.pod(name)["metadata"]["annotations"]
                locked = MUTEX_LOCK in cluster.node_annotations()
                return notes.get(BIND_PHASE) == "success" and not locked

            await until(is_settled)

        async def xid(number: int) -> None:
            """From the driver's event until the list, the annotation and an Event tell it."""
            slices, report = cluster.allocatable(), cluster.node_annotations()[REGISTER]
            told = len(cluster.store.select("events"))
            stub.xid(number, 48)
            await until(
                lambda: (
                    cluster.allocatable() < slices
                    and cluster.node_annotations()[REGISTER] != report
                    and len(cluster.store.select("events")) > told
                )
            )
            await asyncio.sleep(ECHO)

        async def scrape(_: int) -> None:
            await fetch(f"http://127.0.0.1:{cluster.options.web_port}", "/metrics")

        return [
            ("one Allocate", await walked(trail, allocate)),
            ("one scrape of /metrics", await walked(trail, scrape)),
            ("one XID", await walked(trail, xid)),
        ]


if __name__ == "__main__":
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        tables = asyncio.run(main())
    for what, files in tables:
        sys.stdout.write("\n".join([what, *(f"  {file}" for file in files), ""]))
    for what, files in tables:
        sys.stdout.write(f"{what}: {len(files)} files\n")
