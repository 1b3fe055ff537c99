"""Starts the agent as a child process, keeps its log, signals it and waits for it."""

import asyncio
import contextlib
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

import agent

KEPT_LINES: Final = 50_000
MOST_BYTES: Final = 16 * 1024 * 1024
"""The longest line of an agent."""
STOP_DEADLINE: Final = 12.0
"""Seconds after SIGTERM. The agent promises to end within 10 s."""
KILL_DEADLINE: Final = 5.0
_KEPT_VARIABLES: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "LD_LIBRARY_PATH")
_KEPT_PREFIXES: Final = ("PYTHON", "COVERAGE")
_DROPPED: Final = "PYTHONDONTWRITEBYTECODE"
"""This variable is not passed on, because on nodes the agent's bytecode is cached."""
_BARE: Final = ("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
_STATUS: Final = "/proc/self/status"
_SETPCAP: Final = 8
"""CAP_SETPCAP, which a process needs to drop the capabilities that root gets at each exec."""


class LogLine(NamedTuple):
    """One line that `pid` wrote. `fields` is empty if it is not a JSON object."""

    pid: int
    text: str
    fields: Mapping[str, object]

    @property
    def event(self) -> object:
        """The name of the log event."""
        return self.fields.get("event")


class AgentLog:
    """The last lines of the agents of one sandbox; the file at `path` has all of them.

    Calls `heard` after each line and each end of an agent. Raises OSError: the file cannot be made.
    """

    def __init__(self, path: Path, heard: Callable[[], None]) -> None:
        self.lines: deque[LogLine] = deque(maxlen=KEPT_LINES)
        self.heard = heard
        self._file = path.open("w", encoding="utf-8", buffering=1)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def add(self, pid: int, line: bytes) -> None:
        """Keep one line."""
        text, fields = line.decode(errors="replace").rstrip(), dict[str, object]()
        with contextlib.suppress(msgspec.MsgspecError):
            fields = msgspec.json.decode(text, type=dict[str, object])
        self.lines.append(LogLine(pid, text, fields))
        self._file.write(f"{text}\n")
        self.heard()

    def of(self, event: str, pid: int | None = None) -> list[LogLine]:
        """The kept lines with that event, of one process or of all."""
        found = (line for line in self.lines if line.event == event)
        return [line for line in found if pid is None or line.pid == pid]

    def last(self, count: int) -> list[str]:
        """The text of the last `count` lines."""
        return [line.text for line in self.lines][-count:]


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
        """The exit code; None while it runs or its last lines are still to be read."""
        return self._process.returncode if self._over.is_set() else None

    async def read(self) -> None:
        """Read its log lines until it has ended."""
        if self._process.stderr is not None:
            async for line in self._process.stderr:
                self._log.add(self.pid, line)
        await self._process.wait()
        self._over.set()
        self._log.heard()

    async def wait(self) -> int:
        """Wait for its exit code. The caller sets the deadline."""
        await self._over.wait()
        return self._process.returncode or 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Raises TimeoutError: it does not end."""
        self.signal(signal.SIGKILL)
        async with asyncio.timeout(KILL_DEADLINE):
            await self._over.wait()

    async def stop(self) -> int:
        """SIGTERM; after STOP_DEADLINE, SIGKILL. Returns the exit code."""
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
    """Start `hami-agent ARGUMENTS` with this interpreter. Raises OSError: it cannot be started.

    If the system has `setpriv`, the agent ends with this process, so that a killed sandbox leaves
    no process behind, and it has no capabilities of root. It has a session of its own, so Ctrl-C on
    the terminal reaches only the sandbox.
    """
    started = asyncio.get_running_loop().time()
    process = await asyncio.create_subprocess_exec(
        *(*_leash(), sys.executable, "-m", "agent", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=MOST_BYTES,
        cwd=Path(agent.__file__).parents[1],
        env=dict(environ),
        start_new_session=True,
    )
    return AgentChild(process, log, started)


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the child: the given one without settings of the agent."""
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT_VARIABLES or (name.startswith(_KEPT_PREFIXES) and name != _DROPPED)
    }


def _leash() -> tuple[str, ...]:
    """The command that ties the child to this process and drops root's capabilities.

    The systemd unit and the DaemonSet also run the agent without them.
    """
    tool = shutil.which("setpriv")
    if tool is None:
        return ()
    return (tool, "--pdeathsig", "KILL", *(_BARE if may_drop(Path(_STATUS).read_text()) else ()))


def may_drop(status: str) -> bool:
    """Whether a process with this /proc/PID/status can drop root's capabilities.

    In a container without capabilities the attempt would fail.
    """
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return fields["Uid"].split()[1] == "0" and bool(int(fields["CapEff"], 16) >> _SETPCAP & 1)
