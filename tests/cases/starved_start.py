"""The agent starts with a fifth of a core; everything else is healthy.

Pods come as soon as its slices are on offer. Right: they wait, and run.
"""

import asyncio
import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from agent.sandbox.api_errors import Json
from agent.sandbox.lab.cluster import SandboxCluster, open_cluster
from agent.sandbox.scenario.stage import Wish, Workload
from tests.cases.box import quiet, refusals, verdict
from tests.process.agent_process import options

STOPPED, RUNNING = 0.08, 0.02
"""Seconds, in turn."""


def children() -> list[int]:
    """The processes of this one, and setpriv's, which becomes the agent."""
    lists = ((task / "children").read_text() for task in Path("/proc/self/task").iterdir())
    return [int(pid) for text in lists for pid in text.split()]


def throttle(stop: threading.Event) -> None:
    """Stop and continue the agent, whichever it is, until told to end."""
    while not stop.is_set():
        with contextlib.suppress(OSError):  # a process or a thread that ends meanwhile
            agents = [
                pid for pid in children() if b"\0run\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
            for number, seconds in ((signal.SIGSTOP, STOPPED), (signal.SIGCONT, RUNNING)):
                for pid in agents:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(seconds)
    for pid in children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def ran(cluster: SandboxCluster, name: str) -> Json:
    """The status of a new pod once it runs or failed, or after half a minute."""

    def status() -> Json:
        found: Json = cluster.pod(name)["status"]
        return found

    cluster.submit(Workload(name, "", (Wish("main", 1, 500),)).pod())
    await cluster.until(lambda: status().get("phase") in {"Running", "Failed"}, 30)
    return status()


async def play() -> list[str]:
    ends: list[str] = []
    quiet()
    async with open_cluster(options(gpus=4)) as cluster:
        await cluster.start_agent()
        await cluster.until(lambda: cluster.allocatable() == 40, 30)
        stop = threading.Event()
        thread = threading.Thread(target=throttle, args=(stop,))
        thread.start()
        try:
            for number in range(4):
                await cluster.kill_agent()
                await cluster.until(lambda: cluster.allocatable() == 0, 10)
                await cluster.start_agent()
                await cluster.until(lambda: cluster.allocatable() == 40, 40)
                status = await ran(cluster, f"p{number}")
                message = status.get("message", "")
                ends.append(" ".join([status.get("phase", "Pending"), *refusals(message)[:1]]))
                print(ends[-1], message[-160:], flush=True)
        finally:
            stop.set()
            thread.join()
    return ends


ends = asyncio.run(play())
verdict(
    right=ends == ["Running"] * 4,
    wrong="the agent's own lack of CPU is taken for an API server or a disk that does not answer",
)
