"""A sandbox that stays up: it restarts the agent and prints changes."""

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from agent.sandbox.lab.cluster import SandboxCluster

RESTART_DELAY: Final = 1.0
"""Seconds. More than in the systemd unit, so that people can follow."""

Snapshot = Mapping[str, str]


def free_port() -> int:
    """A free port of loopback, to be used by all agents of one sandbox."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


async def keep_agent(cluster: SandboxCluster, tell: Callable[[str], None]) -> None:
    """Start the agent again whenever it has ended, for ever."""
    while True:
        agent = cluster.agent
        code = await agent.wait()
        tell(f"the agent, pid {agent.pid}, ended with {code}")
        await asyncio.sleep(RESTART_DELAY)
        tell(f"agent started, pid {(await cluster.start_agent()).pid}")


async def tell_news(cluster: SandboxCluster, tell: Callable[[str], None]) -> None:
    """Print the changes of slices and pods, for ever."""
    known = _snapshot(cluster)
    while True:
        known, before = await _next(cluster, known), known
        for text in _changes(before, known):
            tell(text)


async def _next(cluster: SandboxCluster, before: Snapshot) -> Snapshot:
    await cluster.pulse.until(lambda: _snapshot(cluster) != before)
    return _snapshot(cluster)


def _snapshot(cluster: SandboxCluster) -> Snapshot:
    pods = {
        f"pod {pod['metadata']['namespace']}/{pod['metadata']['name']}": _state(pod["status"])
        for pod in cluster.store.select("pods")
    }
    return {"slices": f"{cluster.allocatable()} allocatable", **pods}


def _state(status: Mapping[str, object]) -> str:
    return " ".join(str(status[key]) for key in ("phase", "reason") if status.get(key))


def _changes(before: Snapshot, after: Snapshot) -> Iterator[str]:
    for name in after:
        if before.get(name) != after[name]:
            yield f"{name}: {after[name]}"
    for name in before.keys() - after.keys():
        yield f"{name}: gone"
