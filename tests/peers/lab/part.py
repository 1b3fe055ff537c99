"""One program of the cluster: started, stopped, killed, frozen; its last words."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

# Waiting for the world: a condition that is looked at often, with a deadline and a reason.

_STEP: Final = 0.005
_QUESTION_STEP: Final = 0.05


async def until(holds: Callable[[], bool], within: float, why: Callable[[], str]) -> None:
    """Return once `holds()` is true. Raises TimeoutError."""

    async def look() -> bool:
        return holds()

    await until_answer(look, within, why, _STEP)


async def until_answer(
    ask: Callable[[], Awaitable[bool]],
    within: float,
    why: Callable[[], str],
    step: float = _QUESTION_STEP,
) -> None:
    """Return once `ask()` answers true; asked less often, for others have to answer it."""
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
        return Path(f"/proc/{self._first}/root")

    async def open(self) -> None:
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


STOP: Final = 20.0
"""Seconds for SIGTERM, then it is killed."""


class Part:
    """A process, in a node's space or beside it. It can be started again after its end."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        logs: Path,
        *,
        space: NodeSpace | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name: Final = name
        self.command = tuple(command)
        self.log: Final = logs / f"{name}.log"
        self._space = space
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._begin = 0  # where in the log the words of its last start begin
        self.pid = 0
        """Of the program itself, as this process sees it; 0 until it was seen."""

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it; its words go to the end of its log."""
        if self.is_alive:
            raise RuntimeError(f"{self.name} runs already")
        space = self._space
        wrapped = space.command(self.command) if space else (*leash(), *self.command)
        self.pid = 0  # what was there before has ended, and the number may be another's by now
        with self.log.open("ab") as output:
            self._begin = output.tell()
            process = self._process = await asyncio.create_subprocess_exec(
                *wrapped,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                start_new_session=True,
            )
        self.pid = await child_of(process.pid) if space else process.pid

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL. Nothing happens if it does not live."""
        if self._process is not None and self.is_alive:
            self.send(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP):
                    await self._process.wait()
            except TimeoutError:
                await self.kill()

    async def kill(self) -> None:
        if self._process is not None and self.is_alive:
            self.send(signal.SIGKILL)
            self.thaw()  # who waits for a frozen one is frozen too
            await self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP: it holds its sockets and answers nobody."""
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)
        if self._process is not None and self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGCONT)  # who waits for it stopped with it

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program itself; nothing happens if it is gone.

        Before the program was seen, all that its start has made gets the signal.
        """
        if self._process is None or not self.is_alive:
            return
        with contextlib.suppress(ProcessLookupError):  # gone, and this is not known yet
            if self.pid:
                os.kill(self.pid, number)
            else:
                os.killpg(self._process.pid, number)  # never group 0, which is the tests' own

    def said(self, *, since_start: bool = False) -> str:
        """All that it ever said, or since it was started last."""
        text = self.log.read_bytes() if self.log.exists() else b""
        return text[self._begin if since_start else 0 :].decode(errors="replace")

    def tail(self, lines: int = 15) -> str:
        """Its last words, for whoever has to find out why."""
        last = "\n".join(f"  {line[:300]}" for line in self.said().splitlines()[-lines:])
        ended = self._process and f"ended with {self._process.returncode}"
        state = "alive" if self.is_alive else ended
        return f"{self.name} ({state}):\n{last}"


# Programs that people run, and how they end.


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended, what it printed, and what it complained about."""

    code: int
    text: str
    errors: str

    @property
    def words(self) -> str:
        return self.text + self.errors

    @property
    def document(self) -> Any:
        """What it printed, as JSON. Raises AssertionError: it is none."""
        try:
            return json.loads(self.text)
        except json.JSONDecodeError:
            raise AssertionError(f"exit {self.code}: {self.words}") from None

    def succeeded(self) -> str:
        """What it printed. Raises AssertionError: it failed."""
        assert self.code == 0, self.words
        return self.text


async def run_program(
    *command: str, environment: Mapping[str, str], within: float = 240.0, folder: Path | None = None
) -> Ended:
    """Run a program to its end. Raises TimeoutError: it hangs, and is killed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    try:
        async with asyncio.timeout(within):
            said = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    return Ended(process.returncode or 0, *(one.decode(errors="replace") for one in said))
