"""A private world for one node: mounts, processes, cgroups. It ends with the one who made it."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

# Waiting for the world: a condition that is looked at often, with a deadline and a reason.

_STEP: Final = 0.005
_QUESTION_STEP: Final = 0.05


async def until(holds: Callable[[], bool], within: float, why: Callable[[], str]) -> None:
    """Return once `holds()` is true."""

    async def look() -> bool:
        return holds()

    await _until(look, within, why, _STEP)


async def until_answer(
    ask: Callable[[], Awaitable[bool]], within: float, why: Callable[[], str]
) -> None:
    """Return once `ask()` answers true; asked less often, for others have to answer it."""
    await _until(ask, within, why, _QUESTION_STEP)


async def _until(
    ask: Callable[[], Awaitable[bool]], within: float, why: Callable[[], str], step: float
) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while not await ask():
        if loop.time() > end:
            raise TimeoutError(f"{why()} (waited {within:g} s)")
        await asyncio.sleep(step)


CGROUPS: Final = Path("/sys/fs/cgroup")
_HIDDEN: Final = ("/var/lib", "/var/log", "/usr/local")
"""Directories of the host that the node writes below: each gets a layer that is thrown away."""

# The first process of the node. It joins its cgroups before it takes them for the root of all,
# and lives on to reap whatever is orphaned.
_ENTER: Final = 'for file in {files}; do echo $$ >"$file"; done; exec "$@"'
_FIRST: Final = """
set -eu
root=$1; shift
for directory in "$@"; do
  layer="$root/layers$directory"
  mkdir -p "$layer/upper" "$layer/work"
  mount -t overlay overlay \
    -o "lowerdir=$directory,upperdir=$layer/upper,workdir=$layer/work" "$directory"
done
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /var/lib/kubelet "$root/kubelet"
mount --bind "$root/kubelet" /var/lib/kubelet
for directory in /sys/fs/cgroup/*; do
  # Two controllers in one hierarchy have links to it, and a directory may be nobody's.
  if [ -L "$directory" ]; then continue; fi
  found="" with=""
  while read -r _ place kind options _; do
    if [[ $place == "$directory" ]]; then found=$kind; with=${options#rw,relatime,}; fi
  done </proc/mounts
  if [ -z "$found" ]; then continue; fi
  umount "$directory"
  if [[ $found == cgroup ]]; then mount -t cgroup -o "$with" cgroup "$directory"
  else mount -t cgroup2 cgroup2 "$directory"; fi
done
touch "$root/space-is-ready"
while :; do sleep 3600 & wait $! || :; done
"""
_NAMESPACES: Final = ("--mount", "--pid", "--cgroup", "--ipc", "--uts")


class NodeSpace:
    """The namespaces and cgroups of one node, whose files lie below `root`."""

    def __init__(self, root: Path) -> None:
        self.root: Final = root
        self._group = root.name
        self._holder: asyncio.subprocess.Process | None = None
        self._first = 0

    @property
    def view(self) -> Path:
        """The root directory as a process in there sees it."""
        return Path(f"/proc/{self._first}/root")

    async def open(self) -> None:
        """Make it."""
        for group in self._groups():
            group.mkdir()
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (group / name).exists():
                    (group / name).write_text((group.parent / name).read_text())
        log = self.root / "space.log"
        with log.open("wb") as output:
            self._holder = await asyncio.create_subprocess_exec(
                *self._joined(),
                *("unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"),
                *("--propagation", "private", "--", "bash", "-c", _FIRST, "first"),
                *(str(self.root), *_HIDDEN),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        ready = self.root / "space-is-ready"
        await until(ready.exists, 10.0, lambda: f"no namespaces: {log.read_text()}")
        self._first = await child_of(self._holder.pid)

    async def close(self) -> None:
        """Kill everything in there, and leave neither process nor cgroup behind."""
        if self._holder is not None:
            if self._holder.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._first or self._holder.pid, signal.SIGKILL)
            await self._holder.wait()
        groups = self._groups()
        for group in groups:
            await until(partial(is_removed, group), 10.0, lambda: f"{groups} are in use")

    def command(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """The command that runs `arguments` in there."""
        wanted = ("nsenter", "--target", str(self._first), *_NAMESPACES, "--", *arguments)
        return (*self._joined(), *wanted)

    def _joined(self) -> tuple[str, ...]:
        files = " ".join(str(group / "cgroup.procs") for group in self._groups())
        return (*leash(), "bash", "-c", _ENTER.format(files=files), "enter")

    def _groups(self) -> list[Path]:
        return [tree / self._group for tree in hierarchies()]


def hierarchies() -> list[Path]:
    """The mounted trees of cgroups; neither links to them nor directories that are none."""
    present = sorted(CGROUPS.iterdir())
    return [path for path in present if not path.is_symlink() and path.is_mount()]


def leash() -> tuple[str, ...]:
    """What makes a child die with this process, however that ends."""
    tool = shutil.which("setpriv")
    return (tool, "--pdeathsig", "KILL") if tool else ()


async def child_of(pid: int) -> int:
    """The one child of a process, once it has one."""
    await until(lambda: bool(_children(pid)), 10.0, lambda: f"{pid} has no child")
    return _children(pid)[0]


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_removed(group: Path) -> bool:
    """Remove a tree of cgroups from its leaves on; those that are still in use stay."""
    if not group.exists():
        return True
    for path, _, _ in os.walk(group, topdown=False):
        try:
            Path(path).rmdir()
        except OSError:
            return False
    return True


# What /proc tells of a process: its rights, and what it may write to.


def status_of(pid: int) -> Mapping[str, str]:
    """/proc/PID/status by name. Raises OSError: there is no such process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def writable(pid: int) -> frozenset[str]:
    """Where something is mounted for writing, as the process sees it. Raises OSError: as above."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    mounts = (line.split() for line in lines)
    return frozenset(one[4] for one in mounts if "rw" in one[5].split(","))


# What the kubelet makes of an error on its way into a pod's status.


def because(error: str) -> str:
    """The message of a pod that was rejected because of an error of the device manager."""
    return f"Pod was rejected: Allocate failed due to {error}, which is unexpected"
