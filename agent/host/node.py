"""What a host shows of itself: CDI, cgroups, mounts, its surroundings."""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from agent.cluster import PodUid
from agent.kit.disk import check_writable
from agent.kit.tasks import Offload
from agent.kubelet.door import listens

# Reads which device names the CDI specifications of the host define.
#
# A runtime drops a malformed file, and a name that a directory has twice. Both count here: the
# runtime's own sentence names the file then.
# Source: container-device-interface pkg/cdi cache.go, spec-dirs.go, spec.go.


class CdiDirectories:
    """The CDI specifications of the runtime. It reads files again only if one of them changed.

    `in_pod`: a directory that is missing is not mounted, so nothing is known of it. On the host it
    has no specification.
    """

    def __init__(self, offload: Offload, *, in_pod: bool) -> None:
        self._offload = offload
        self._in_pod = in_pod
        self._files: list[tuple[Path, int, int, int]] = []  # path, inode, bytes, time of change
        self._defined: frozenset[str] = frozenset()

    async def names(self, directories: Sequence[str]) -> frozenset[str] | None:
        """The device names that they define, by the rules of the runtime; None: not known."""
        return await self._offload.call(self._names, directories)

    def _names(self, directories: Sequence[str]) -> frozenset[str] | None:
        try:
            files = [file for directory in directories for file in self._listed(Path(directory))]
            if files != self._files:
                found = [read_specification(path.read_bytes()) for path, *_ in files]
                self._defined, self._files = frozenset().union(*found), files
        except OSError:
            return None
        return self._defined

    def _listed(self, directory: Path) -> Iterator[tuple[Path, int, int, int]]:
        """The files of the directory. Raises OSError: some of them cannot be known."""
        if not self._in_pod and not directory.exists():
            return

        paths = [path for path in directory.iterdir() if path.suffix in {".json", ".yaml"}]
        if not directory.stat().st_nlink:
            # The host's directory that was mounted here is removed: it may have another one now.
            raise FileNotFoundError(directory)

        for path in sorted(paths):
            status = path.stat()  # a link may lead to where only the host's root leads
            if stat.S_ISREG(status.st_mode):
                yield path, status.st_ino, status.st_size, status.st_ctime_ns


def read_specification(content: bytes) -> frozenset[str]:
    """The names `vendor/class=device` that a JSON or YAML file defines; none if it is malformed."""
    try:
        loader: type[yaml.BaseLoader] = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
        document: Any = next(iter(yaml.load_all(content, Loader=loader)), {})
        return frozenset(f"{document['kind']}={device['name']}" for device in document["devices"])
    except (yaml.YAMLError, UnicodeError, RecursionError, LookupError, TypeError):
        return frozenset()


# Tells which containers run on this host: the name of a container's cgroup holds its id.
#
# Source: the cgroupfs and systemd drivers of containerd and CRI-O name it `<id>` or
# `<runtime>-<id>.scope` below the pod's cgroup. The kubelet names that one: `pod<UID>`, or with
# systemd `kubepods-<class>-pod<UID with underscores>.slice` (kubernetes
# pkg/kubelet/cm/pod_container_manager_linux.go).

_ID = re.compile(r"(^|-)[0-9a-f]{64}(\.scope)?$")
_POD = re.compile(r"(^|-)pod([0-9a-f]{8}[0-9a-f_-]*)")
"""The names of a container's and of a pod's cgroup; the second group is the pod's UID."""


class CgroupContainers:
    """The Containers port over the cgroup tree at `root`, read-only, on the worker thread."""

    def __init__(self, root: Path, offload: Offload) -> None:
        self._root = root
        self._offload = offload

    async def running(self, ids: frozenset[str]) -> frozenset[str] | None:
        """Return those of the runtime ids that have a cgroup.

        None: the tree says nothing. No pods' cgroup is visible, or no directory below them is named
        by a container's id (a runtime that names them in another way).
        """
        below = await self._offload.call(self._below) if ids else []
        wanted = {text.rpartition("://")[2]: text for text in ids}

        # The runtime id in the name of each cgroup. CRI-O's monitor process has one beside it.
        parts = [name.removesuffix(".scope").rpartition("-") for _, name in below]
        found = [id_ for prefix, _, id_ in parts if not prefix.endswith("conmon")]
        running = frozenset(wanted[id_] for id_ in found if id_ in wanted)

        has_pods = any(_POD.search(name) for _, name in below)
        is_known = bool(below) and (_has_containers(below) or not has_pods)
        return running if is_known or running == ids else None

    async def begun(self) -> frozenset[PodUid] | None:
        """Return the pods that have a cgroup, which the kubelet names by their UID.

        None: the kubelet's cgroups are not visible, or they name containers and no pod.
        """
        below = await self._offload.call(self._below)
        found = (_POD.search(name) for _, name in below)
        pods = frozenset(PodUid(one[2].replace("_", "-")) for one in found if one)
        # Right after a boot no pod has begun. But a container belongs to a pod that has.
        return pods if below and (pods or not _has_containers(below)) else None

    def _below(self) -> list[tuple[str, str]]:
        """All cgroups, as the path of the parent and the name; none if no pod's are visible."""
        below = [(path, name) for path, names, _ in os.walk(self._root) for name in names]
        return below if any("kubepods" in name for _, name in below) else []


def _has_containers(below: Iterable[tuple[str, str]]) -> bool:
    return any("kubepods" in path and _ID.search(name) for path, name in below)


# Inspects paths and sockets of this host; it changes none.


def write_failure(directory: Path) -> int:
    """The number of the error that a new file in the directory would meet; 0: none is known."""
    try:
        with contextlib.ExitStack() as opened:
            place = os.open(directory, os.O_PATH | os.O_DIRECTORY)
            opened.callback(os.close, place)
            check_writable(place, str(directory))  # the rule of the running agent
    except OSError as error:
        return error.errno or errno.EIO
    return 0 if os.access(directory, os.W_OK | os.X_OK) else errno.EACCES


def foreign_plugins(directory: Path) -> list[str]:
    """The sockets there with a name of HAMi's or NVIDIA's plugin on which a process listens."""
    with contextlib.suppress(OSError):
        return [str(path) for path in sorted(directory.glob("nvidia-*")) if listens(path)]
    return []
