"""The agent as a child process: started, read, signalled and waited for."""

import asyncio
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import agent
from agent.sandbox.lab.journal import AgentLog

STOP_DEADLINE: Final = 12.0
"""Seconds for SIGTERM: the agent promises ten."""
KILL_DEADLINE: Final = 5.0
_CHUNK: Final = 64 * 1024
_KEPT_VARIABLES: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "LD_LIBRARY_PATH")
_KEPT_PREFIXES: Final = ("PYTHON", "COVERAGE")
_DROPPED: Final = "PYTHONDONTWRITEBYTECODE"
"""An agent that compiles itself at every start is not the one that nodes run."""


_BARE: Final = ("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
_STATUS: Final = "/proc/self/status"
_SETPCAP: Final = 8
"""CAP_SETPCAP, without which nobody can give up what root gets anew with each program."""


class AgentChild:
    """One agent process. `code` is its exit code, negative for a signal, None while it lives."""

    def __init__(self, process: asyncio.subprocess.Process, log: AgentLog, started: float) -> None:
        self._process = process
        self._log = log
        self._over = asyncio.Event()
        self.started: Final = started
        self.pid: Final = process.pid

    @property
    def code(self) -> int | None:
        """How it ended; None while it lives or its last lines are still to be read."""
        return self._process.returncode if self._over.is_set() else None

    async def read(self) -> None:
        """Take every line that it says, until it has ended."""
        loop = asyncio.get_running_loop()
        stream = self._process.stderr
        rest = b""
        while stream is not None and (chunk := await stream.read(_CHUNK)):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._log.add(loop.time(), self.pid, line)
        await self._process.wait()
        self._over.set()
        self._log.add(loop.time(), self.pid, rest)

    async def wait(self) -> int:
        """Its exit code, once it has ended. The deadline is the caller's."""
        await self._over.wait()
        return self._process.returncode or 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; one that has ended gets none."""
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone.

        Raises:
            TimeoutError: the kernel does not let it go.
        """
        self.signal(signal.SIGKILL)
        async with asyncio.timeout(KILL_DEADLINE):
            await self._over.wait()

    async def stop(self) -> int:
        """SIGTERM, its exit code; SIGKILL when it takes longer than it may."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_DEADLINE):
                return await self.wait()
        except TimeoutError:
            await self.kill()
            return await self.wait()


async def start_child(
    arguments: Sequence[str], environ: Mapping[str, str], log: AgentLog
) -> AgentChild:
    """Start `hami-agent ARGUMENTS` with this interpreter, in a session of its own.

    Where the system has `setpriv`, it dies with this process, so that killing a sandbox leaves
    nothing behind, and has none of root's capabilities. ctrl-c on the terminal reaches only the
    sandbox.

    Raises:
        OSError: it cannot be started.
    """
    started = asyncio.get_running_loop().time()
    process = await asyncio.create_subprocess_exec(
        *_leash(),
        *(sys.executable, "-m", "agent", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(agent.__file__).parents[1],
        env=dict(environ),
        start_new_session=True,
    )
    return AgentChild(process, log, started)


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the child may inherit: nothing that is a setting."""
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT_VARIABLES or (name.startswith(_KEPT_PREFIXES) and name != _DROPPED)
    }


def _leash() -> tuple[str, ...]:
    """It ends with us, and is root without capabilities, as the unit and the DaemonSet run it."""
    tool = shutil.which("setpriv")
    if tool is None:
        return ()
    return (tool, "--pdeathsig", "KILL", *(_BARE if may_drop(Path(_STATUS).read_text()) else ()))


def may_drop(status: str) -> bool:
    """Whether a process with this /proc/PID/status can give up root's capabilities for good.

    In a container without any there is nothing to give up, and the attempt fails.
    """
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return fields["Uid"].split()[1] == "0" and bool(int(fields["CapEff"], 16) >> _SETPCAP & 1)
