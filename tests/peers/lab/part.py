"""One program of the cluster: started, stopped, killed, frozen; its last words."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.peers.lab.space import NodeSpace, child_of, leash

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
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives or before it was started."""
        return None if self._process is None else self._process.returncode

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

    async def stop(self, within: float = STOP) -> int | None:
        """SIGTERM, then SIGKILL; its exit code, or None if it was never started."""
        process = self._process
        if process is None or process.returncode is not None:
            return self.code
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(within):
                return await process.wait()
        except TimeoutError:
            await self.kill()
        return self.code

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None and self.is_alive:
            self.send(signal.SIGKILL)
            self.thaw()  # who waits for a frozen one is frozen too
            await self._process.wait()

    async def wait(self) -> int:
        """Its exit code, once it has ended. The deadline is the caller's."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return await self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP: it holds its sockets and answers nobody."""
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
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

    def said(self) -> str:
        """All that it ever said."""
        return self._text().decode(errors="replace")

    def said_since_start(self) -> str:
        """What it said since it was started last."""
        return self._text()[self._begin :].decode(errors="replace")

    def _text(self) -> bytes:
        return self.log.read_bytes() if self.log.exists() else b""

    def tail(self, lines: int = 15) -> str:
        """Its last words, for whoever has to find out why."""
        last = "\n".join(f"  {line[:300]}" for line in self.said().splitlines()[-lines:])
        state = "alive" if self.is_alive else f"ended with {self.code}"
        return f"{self.name} ({state}):\n{last}"
