"""A machine with systemd as PID 1: a container of systemd-nspawn on the programs of this host."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BOOTED: Final = 30.0
"""Seconds until all that starts by itself has started; one or two on an idle machine."""
STOPPED: Final = 15.0
LOCK: Final = Path("/run/lock/hami-agent-systemd-tests")
CGROUPS: Final = Path("/sys/fs/cgroup")
LINKS: Final = ("bin", "sbin", "lib", "lib64")
FOLDERS: Final = (
    *("usr", "etc/systemd/system", "var/log/journal", "opt", "root", "tmp", "proc", "sys"),
    *("dev", "run", "src"),
)
FILES: Final[Mapping[str, str]] = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/machine-id": "",
    "etc/os-release": "ID=tests\n",
}


class CannotBootError(Exception):
    """This host boots no machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Said:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Machine:
    """A booted machine. `root` is its file system as this host sees it, but for what is bound."""

    root: Path
    leader: int

    async def try_run(self, *command: str, within: float = 120.0) -> Said:
        """Run a command as the machine's root, to its end."""
        process = await asyncio.create_subprocess_exec(
            *("nsenter", "-t", str(self.leader), "-m", "-u", "-i", "-n", "-p", "--"),
            *("/usr/bin/env", "-i", "PATH=/usr/local/bin:/usr/sbin:/usr/bin", "HOME=/root"),
            *("LC_ALL=C.UTF-8", *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(within):
                out, err = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        return Said(process.returncode or 0, out.decode(), err.decode())

    async def run(self, *command: str, within: float = 120.0) -> str:
        """The same of a command that has to end well; what it said on standard output."""
        said = await self.try_run(*command, within=within)
        assert 0 == said.code, (command, said)
        return said.out

    def path(self, inside: str) -> Path:
        """A file of the machine, for this host."""
        return self.root / inside.lstrip("/")


def lacks() -> str:
    """What this host has not, in a few words; empty where a boot can be tried."""
    if os.geteuid() != 0:
        return "root"
    if shutil.which("systemd-nspawn") is None:
        return "systemd-nspawn (Debian's systemd-container)"
    return "" if Path("/usr/lib/systemd/systemd").exists() else "systemd"


@contextlib.asynccontextmanager
async def booted(root: Path, binds: Mapping[Path, str]) -> AsyncIterator[Machine]:
    """A machine on the programs of this host; `binds` are folders of this host, by their place.

    Raises CannotBootError.
    """
    _furnish(root)
    async with _alone():
        _sweep()
        log = root.with_suffix(".log")
        nspawn = await _start(root, binds, log)
        try:
            machine = await _up(root, nspawn, log)
            yield machine
            await machine.try_run("systemctl", "poweroff")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOPPED):
                    await nspawn.wait()
        finally:
            await _ended(nspawn)
            _sweep()


def _furnish(root: Path) -> None:
    """What is a machine's own: empty places, and who root is."""
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in LINKS:
        (root / name).symlink_to(f"usr/{name}")
    for name, text in FILES.items():
        (root / name).write_text(text)
    shutil.copy("/etc/ld.so.cache", root / "etc/ld.so.cache")
    units = root / "etc/systemd/system"
    (units / "default.target").symlink_to("/usr/lib/systemd/system/multi-user.target")


@contextlib.asynccontextmanager
async def _alone() -> AsyncIterator[None]:
    """Two such machines at once would share the names of their cgroups."""
    handle = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await asyncio.to_thread(fcntl.flock, handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


async def _start(root: Path, binds: Mapping[Path, str], log: Path) -> asyncio.subprocess.Process:
    arguments: Sequence[str] = (
        *("--quiet", f"--directory={root}", "--machine=hami-agent-tests", "--register=no"),
        *("--keep-unit", "--console=pipe", "--resolv-conf=off", "--timezone=off"),
        *("--link-journal=no", "--bind-ro=/usr", "--bind-ro=/etc/alternatives"),
        *(f"{_bind(there)}={here}:{there}" for here, there in binds.items()),
        "--boot",
    )
    with log.open("wb") as said:
        return await asyncio.create_subprocess_exec(
            # Told to end, it powers the machine off; killed, it would leave the machine running.
            *("setpriv", "--pdeathsig", "TERM", "systemd-nspawn", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            start_new_session=True,
        )


def _bind(place: str) -> str:
    """What the machine gets for its tests is not its own to change."""
    return "--bind-ro" if place.startswith("/src/") else "--bind"


def _children(pid: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in brackets may hold anything; state and parent follow it.
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                yield int(path.parent.name)


async def _up(root: Path, nspawn: asyncio.subprocess.Process, log: Path) -> Machine:
    """The machine once its systemd says that everything has started."""
    try:
        async with asyncio.timeout(BOOTED):
            while nspawn.returncode is None:
                for leader in _children(nspawn.pid):
                    machine = Machine(root, leader)
                    state = await machine.try_run("systemctl", "is-system-running", "--wait")
                    if state.out.strip() in {"running", "degraded"}:
                        return machine
                await asyncio.sleep(0.1)
    except (TimeoutError, OSError) as error:
        raise CannotBootError(f"no systemd came up: {error!r}; {_last(log)}") from error
    raise CannotBootError(f"systemd-nspawn ended with {nspawn.returncode}: {_last(log)}")


async def _ended(nspawn: asyncio.subprocess.Process) -> None:
    """See the machine out, whatever state it is in."""
    if nspawn.returncode is None:
        for leader in _children(nspawn.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(leader, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOPPED):
                await nspawn.wait()
    if nspawn.returncode is None:
        nspawn.kill()
        await nspawn.wait()


def _last(log: Path) -> str:
    return log.read_text(errors="replace").strip().rpartition("\n")[2][:300]


def _sweep() -> None:
    """nspawn leaves its cgroups behind."""
    for found in (CGROUPS, *CGROUPS.iterdir()):
        for name in ("payload", "supervisor"):
            for path in sorted((found / name).rglob("*/"), reverse=True):
                with contextlib.suppress(OSError):
                    path.rmdir()
            with contextlib.suppress(OSError):
                (found / name).rmdir()
