"""Tells which containers run on this host: the name of a container's cgroup holds its id.

Source: the cgroupfs and systemd drivers of containerd and CRI-O name it `<id>` or
`<runtime>-<id>.scope` below the pod's cgroup.
"""

import os
from pathlib import Path

from agent.kit.offload import Offload


class CgroupContainers:
    """The Containers port over the cgroup tree at `root`, read-only, on the worker thread."""

    def __init__(self, root: Path, offload: Offload) -> None:
        self._root = root
        self._offload = offload

    async def running(self, ids: frozenset[str]) -> frozenset[str]:
        """Return those of the runtime ids that have a cgroup; all if no pod's cgroup is visible."""
        if not ids:
            return ids
        return await self._offload.call(self._running, ids)

    def _running(self, ids: frozenset[str]) -> frozenset[str]:
        wanted = {text.rpartition("://")[2]: text for text in ids}
        running: set[str] = set()
        is_visible = False
        for _, names, _ in os.walk(self._root):
            is_visible = is_visible or any("kubepods" in name for name in names)
            running.update(wanted[id_] for name in names if (id_ := _container(name)) in wanted)
            if len(running) == len(wanted):
                break
        return frozenset(running) if is_visible else ids


def _container(name: str) -> str:
    """The runtime id in the name of a cgroup; empty for CRI-O's monitor process beside it."""
    prefix, _, container = name.removesuffix(".scope").rpartition("-")
    return "" if prefix.endswith("conmon") else container
