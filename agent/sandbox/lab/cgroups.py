"""A cgroup tree with a directory for each container that runs, as the runtime keeps one."""

from pathlib import Path

from agent.sandbox.kubelet.model import KubeletModel
from agent.sandbox.kubelet.podstatus import running_status


class CgroupTree:
    """Kept true by `sync`, to be called after whatever may have started or ended a container."""

    def __init__(self, root: Path, kubelet: KubeletModel) -> None:
        self._home = root / "kubepods"
        self._home.mkdir()
        self._kubelet = kubelet
        self._there: set[str] = set()

    def sync(self) -> None:
        """Make and remove directories until there is one for each running container."""
        running = self._running()
        for name in running - self._there:
            (self._home / name).mkdir()
        for name in self._there - running:
            (self._home / name).rmdir()
        self._there = running

    def _running(self) -> set[str]:
        found: set[str] = set()
        for pod in self._kubelet.node.pods.values():
            status = running_status(pod, {}, "")
            for key in ("initContainerStatuses", "containerStatuses"):
                ids = (one["containerID"] for one in status.get(key, ()) if one["ready"])
                found |= {text.rpartition("://")[2] for text in ids}
        return found
