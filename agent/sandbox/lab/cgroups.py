"""A directory tree like the runtime's cgroups, with a directory for each running container."""

from pathlib import Path

from agent.sandbox.kubelet.model import KubeletModel
from agent.sandbox.kubelet.podstatus import running_status


class CgroupTree:
    """The tree. Call `sync` after each event that can start or end a container."""

    def __init__(self, root: Path, kubelet: KubeletModel) -> None:
        self._home = root / "kubepods"
        self._home.mkdir()
        self._kubelet = kubelet
        self._there: set[str] = set()

    def sync(self) -> None:
        """Create and remove directories, so that there is one for each running container."""
        running = self._running()
        for name in running - self._there:
            (self._home / name).mkdir()
        for name in self._there - running:
            (self._home / name).rmdir()
        self._there = running

    def _running(self) -> set[str]:
        running: set[str] = set()
        for pod in self._kubelet.node.pods.values():
            status = running_status(pod, {}, "")
            for key in ("initContainerStatuses", "containerStatuses"):
                ids = (each["containerID"] for each in status.get(key, ()) if each["ready"])
                running |= {text.rpartition("://")[2] for text in ids}
        return running
