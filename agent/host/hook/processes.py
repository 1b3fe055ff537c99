"""Tells which processes of containers exist, by the host's /proc and its cgroup tree.

HAMi-core knows a process by its PID in the container, and one that was killed keeps its slot. The
kernel lists the host's PIDs of a container's cgroup, and for each the PID in the container.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

INIT_NAMESPACE: Final = "pid:[4026531836]"
"""The host's own PID namespace. Source: Linux include/linux/proc_ns.h (PROC_PID_INIT_INO)."""
CONTROLLERS: Final = ("pids", "memory", "systemd", ".")
"""Where pods may be in the cgroup tree: with cgroup v1 each controller has a tree of its own."""
DEEPEST: Final = 5
"""How deep the cgroup of a pod may be, as in kubelet/kubepods/burstable/pod<UID>."""
SEARCH_EVERY: Final = 12
"""Rounds between two searches for a pod whose cgroup is gone."""
CGROUPS: Final = 64
"""Cgroups of one pod: a container may have some below its own."""
LOOKUPS: Final = 50
"""Processes of one cgroup whose PID in the container is read in one round; the next goes on."""
READ: Final = 64 * 1024
POD: Final = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?:\.slice)?$")
NSPID: Final = re.compile(rb"^NSpid:.*\s(\d+)$", re.MULTILINE)


class ContainerProcesses:
    """Remembers between rounds what it found, because asking about one process costs 20 µs.

    `cgroups`: the cgroup tree. `proc`: /proc, which must show the processes of the host.
    """

    def __init__(self, cgroups: Path, proc: Path = Path("/proc")) -> None:
        self._cgroups = cgroups
        self._proc = proc
        self._rounds = 0
        self._is_host = self._is_due = False
        self._pods: dict[str, Path] = {}
        self._gone = set[str]()
        self._owners: dict[Path, str] = {}
        self._known: dict[Path, dict[int, int]] = {}

    def begin(self, names: Iterable[str]) -> None:
        """Begin a round about the containers of these directories."""
        self._rounds += 1
        uids = frozenset(map(_uid, names))
        self._is_host = bool(uids) and self._sees_the_host()
        self._pods = {uid: path for uid, path in self._pods.items() if uid in uids}
        self._gone &= uids
        self._is_due = self._rounds % SEARCH_EVERY == 0
        if self._is_due:
            for remembered in (self._owners, self._known):
                for path in [path for path in remembered if not path.is_dir()]:
                    del remembered[path]

    def _sees_the_host(self) -> bool:
        """Whether this is the host's PID namespace, and processes of others are not hidden."""
        try:
            namespace = (self._proc / "self/ns/pid").readlink()
        except OSError:
            return False
        return str(namespace) == INIT_NAMESPACE and self._read(self._proc / "1/status") != b""

    def alive(self, name: str, wanted: frozenset[int]) -> frozenset[int] | None:
        """Those of the PIDs in the container of that directory that exist; None: not known."""
        living = frozenset[int]()
        pod = self._pod(_uid(name)) if self._is_host else None
        if pod is None:
            return None
        cgroups = _directories(pod)  # none, if it is gone: then no process lives
        if len(cgroups) == CGROUPS:
            return None
        for cgroup in cgroups:
            pids = self._pids(cgroup)
            owner = self._owner(cgroup, pids or (), _uid(name))
            if pids is None or (pids and owner is None):
                return None
            if owner == name:
                matched = self._matched(cgroup, pids, wanted)
                if matched is None:
                    return None
                living |= matched
        return living

    def _pod(self, uid: str) -> Path | None:
        """The cgroup of the pod; None: it was never seen. A path stays when the cgroup is gone."""
        path = self._pods.get(uid)
        if path is not None and path.is_dir():
            self._gone.discard(uid)
        elif self._is_due or uid not in self._gone:
            self._gone.add(uid)
            self._is_due = False
            for controller in CONTROLLERS:
                if found := dict(_pods(self._cgroups / controller, DEEPEST)):
                    self._pods |= found
                    break
        return self._pods.get(uid)

    def _pids(self, cgroup: Path) -> tuple[int, ...] | None:
        """The host's PIDs in the cgroup and below; None: more than is read."""
        text, pending = b"", [cgroup]
        for _ in range(CGROUPS):
            here = pending.pop()
            text += self._read(here / "cgroup.procs") + b"\n"
            pending += _directories(here)
            if len(text) >= READ:
                return None
            if not pending:
                return tuple(map(int, text.split()))
        return None

    def _owner(self, cgroup: Path, pids: Iterable[int], uid: str) -> str | None:
        """The container directory that is mounted in the cgroup's processes; "": none is."""
        if cgroup not in self._owners:
            mounted = re.compile(f"/({uid}_[-a-z0-9]+) ".encode())
            for pid in itertools.islice(pids, 3):
                if text := self._read(self._proc / f"{pid}/mountinfo"):
                    found = mounted.search(text)
                    self._owners[cgroup] = found[1].decode() if found else ""
                    break
        return self._owners.get(cgroup)

    def _matched(
        self, cgroup: Path, pids: tuple[int, ...], wanted: frozenset[int]
    ) -> frozenset[int] | None:
        """Those of the wanted PIDs that a process of the cgroup has; None: not all were asked."""
        before = self._known.get(cgroup, {})
        known = self._known[cgroup] = {pid: before[pid] for pid in pids if pid in before}
        missing = wanted - set(known.values())
        unknown = iter([pid for pid in pids if pid not in known])
        for pid in itertools.islice(unknown, LOOKUPS):
            if not missing:
                break
            if found := NSPID.search(self._read(self._proc / f"{pid}/status")):
                known[pid] = int(found[1])
                missing -= {known[pid]}
        if missing and next(unknown, None) is not None:
            return None
        return wanted - missing

    def _read(self, path: Path) -> bytes:
        """The first READ bytes of a file of the kernel; nothing if it cannot be read."""
        with contextlib.suppress(OSError), path.open("rb") as opened:
            return opened.read(READ)
        return b""


def _uid(name: str) -> str:
    return name.partition("_")[0]


def _directories(path: Path) -> list[Path]:
    """At most CGROUPS directories in this one; none if it is gone."""
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        found = (path / entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        return list(itertools.islice(found, CGROUPS))
    return []


def _pods(path: Path, depth: int) -> Iterator[tuple[str, Path]]:
    """The UIDs of pods and their cgroups below this one, which no pod may write."""
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for name in names:
            if found := POD.search(name):
                yield found[1].replace("_", "-"), path / name
            elif depth > 1:
                yield from _pods(path / name, depth - 1)
