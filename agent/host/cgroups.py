"""Tells which containers run on this host: the name of a container's cgroup holds its id.

Source: the cgroupfs and systemd drivers of containerd and CRI-O name it `<id>` or
`<runtime>-<id>.scope` below the pod's cgroup. The kubelet names that one: `pod<UID>`, or with
systemd `kubepods-<class>-pod<UID with underscores>.slice`
(kubernetes pkg/kubelet/cm/pod_container_manager_linux.go).
"""

import os
import re
from pathlib import Path

from agent.core.cluster.pods import PodUid
from agent.kit.offload import Offload

_ID = re.compile(r"(^|-)[0-9a-f]{64}(\.scope)?$")
_POD = re.compile(r"(^|-)pod([0-9a-f]{8}[0-9a-f_-]*)")


class CgroupContainers:
    """The Containers port over the cgroup tree at `root`, read-only, on the worker thread."""

    def __init__(self, root: Path, offload: Offload) -> None:
        self._root = root
        self._offload = offload

    async def running(self, ids: frozenset[str]) -> frozenset[str] | None:
        """Return those of the runtime ids that have a cgroup.

        None: the tree says nothing. No pods' cgroup is visible, or there are pods and no directory
        below them is named by a container's id (a runtime that names them in another way).
        """
        if not ids:
            return ids
        return await self._offload.call(self._running, ids)

    async def begun(self) -> frozenset[PodUid] | None:
        """Return the pods that have a cgroup, which the kubelet names by their UID.

        None: the kubelet's cgroups are not visible.
        """
        return await self._offload.call(self._begun)

    def _begun(self) -> frozenset[PodUid] | None:
        below = [name for _, names, _ in os.walk(self._root) for name in names]
        if not any("kubepods" in name for name in below):
            return None
        found = map(_POD.search, below)
        return frozenset(PodUid(one[2].replace("_", "-")) for one in found if one)

    def _running(self, ids: frozenset[str]) -> frozenset[str] | None:
        wanted = {text.rpartition("://")[2]: text for text in ids}
        running: set[str] = set()
        is_visible = has_pods = has_ids = False
        for path, names, _ in os.walk(self._root):
            is_visible = is_visible or any("kubepods" in name for name in names)
            if not is_visible:
                continue
            has_pods = has_pods or any(_POD.search(name) for name in names)
            # The runtime id in the name of each cgroup. CRI-O's monitor process has one beside it.
            parts = [name.removesuffix(".scope").rpartition("-") for name in names]
            found = [id_ for prefix, _, id_ in parts if not prefix.endswith("conmon")]
            has_ids = has_ids or ("kubepods" in path and any(map(_ID.search, names)))
            running.update(wanted[id_] for id_ in found if id_ in wanted)
            if len(running) == len(wanted):
                return frozenset(running)
        return frozenset(running) if is_visible and (has_ids or not has_pods) else None
