"""Which containers live on this host: a container's cgroup is a directory with its id in it.

Source: the cgroupfs and systemd drivers of containerd and CRI-O name it `<id>` or
`<runtime>-<id>.scope` below the pod's cgroup.
"""

import os
from pathlib import Path

from agent.kit.offload import Offload


class CgroupContainers:
    """Containers over the cgroup tree at `root`, read-only, on the worker thread."""

    def __init__(self, root: Path, offload: Offload) -> None:
        self._root = root
        self._offload = offload

    async def running(self, ids: frozenset[str]) -> frozenset[str]:
        """Which of these runtime ids have a live cgroup; all of them where that cannot be seen."""
        if not ids:
            return ids
        return await self._offload.call(self._running, ids)

    def _running(self, ids: frozenset[str]) -> frozenset[str]:
        wanted = {text.rpartition("://")[2]: text for text in ids}
        found: set[str] = set()
        seen = False
        for _, names, _ in os.walk(self._root):
            seen = seen or any("kubepods" in name for name in names)
            found.update(wanted[one] for name in names if (one := _container(name)) in wanted)
            if len(found) == len(wanted):
                break
        return frozenset(found) if seen else ids


def _container(name: str) -> str:
    """The runtime id in the name of a cgroup; the monitor that CRI-O puts beside it has none."""
    prefix, _, container = name.removesuffix(".scope").rpartition("-")
    return "" if prefix.endswith("conmon") else container
