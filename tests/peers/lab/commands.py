"""The programs of an operator, run as they run them: helm and kubectl, as the cluster's admin."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.peers.lab.cluster import Cluster
from tests.peers.lab.identities import ADMIN

SECONDS: Final = 240.0
"""Until a command is taken to hang; each has a deadline of its own below that."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that has ended, and what it said, errors included."""

    code: int
    words: str


class Commands:
    """The two programs at one cluster; `tools` is the folder that tests/chart/build printed."""

    def __init__(self, cluster: Cluster, tools: Path, binaries: Path) -> None:
        self._root = cluster.root
        self._tools = tools
        self._binaries = binaries
        self._kubeconfig = str(cluster.plane.kubeconfig(ADMIN))

    async def helm(self, *arguments: str) -> str:
        """What helm said. Raises AssertionError: it failed."""
        return succeeded(await self.try_helm(*arguments))

    async def try_helm(self, *arguments: str) -> Ended:
        """How a helm ended."""
        return await self._run(self._tools / "helm", *arguments)

    async def kubectl(self, *arguments: str) -> str:
        """What kubectl said. Raises AssertionError: it failed."""
        return succeeded(await self.try_kubectl(*arguments))

    async def try_kubectl(self, *arguments: str) -> Ended:
        """How a kubectl ended."""
        return await self._run(self._binaries / "kubectl", *arguments)

    async def _run(self, program: Path, *arguments: str) -> Ended:
        room = self._root / "home"
        room.mkdir(exist_ok=True)
        environment = {"HOME": str(room), "PATH": "/usr/bin:/bin", "KUBECONFIG": self._kubeconfig}
        process = await asyncio.create_subprocess_exec(
            *(str(program), *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
        )
        try:
            async with asyncio.timeout(SECONDS):
                words, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        return Ended(process.returncode or 0, words.decode(errors="replace"))


def succeeded(ended: Ended) -> str:
    """What it said. Raises AssertionError: it failed."""
    assert ended.code == 0, ended.words
    return ended.words
