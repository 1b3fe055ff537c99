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
        bare = {text.rpartition("://")[2]: text for text in ids}
        found: set[str] = set()
        seen = False
        for _, names, _ in os.walk(self._root):
            for name in names:
                seen = seen or "kubepods" in name
                container = name.removesuffix(".scope").rpartition("-")[2]
                if container in bare or name in bare:
                    found.add(bare.get(container) or bare[name])
            if len(found) == len(bare):
                break
        return frozenset(found) if seen else ids
