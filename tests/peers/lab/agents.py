"""The agent under test: the command as an operator runs it, in a node's space."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp

import agent
from agent.sandbox.hardware_talk import HardwareRequest, ask
from tests.peers.lab.part import Part, until

_DEADLINE: Final = aiohttp.ClientTimeout(total=5.0)
RESOURCE: Final = "nvidia.com/gpu"
SOURCE: Final = Path(agent.__file__).parents[1]


class Agent:
    """One `hami-agent run`. Directories are the real ones, which in its space are private."""

    def __init__(self, part: Part, run_dir: Path) -> None:
        self.part: Final = part
        self._run = run_dir

    async def simulate(self, request: HardwareRequest) -> object:
        """Make something happen to its GPUs."""
        return await ask(self._run / "simulate.sock", request)

    def events(self, name: str) -> list[Mapping[str, Any]]:
        """The log lines of one event, in order, those of earlier starts included."""
        return [line for line in _lines(self.part.said()) if line.get("event") == name]

    def events_since_start(self, name: str) -> list[Mapping[str, Any]]:
        """The log lines of one event, in order, since the agent was started last."""
        return [
            line for line in _lines(self.part.said(since_start=True)) if line.get("event") == name
        ]

    def answers(self) -> Counter[tuple[str, str]]:
        """How often each container was answered, by pod and container."""
        return Counter((one["pod"], one["ctr"]) for one in self.events("alloc.answered"))

    async def page(self, path: str) -> tuple[int, str]:
        """Status and text of a page at the port that it opened last since its start."""

        def ports() -> list[int]:
            opened = self.events_since_start("web.listening")
            return [line["port"] for line in opened if "port" in line]

        await until(lambda: bool(ports()), 10.0, self.part.tail)
        url = f"http://127.0.0.1:{ports()[-1]}{path}"
        async with aiohttp.ClientSession(timeout=_DEADLINE) as session, session.get(url) as answer:
            return answer.status, await answer.text()

    async def is_ready(self) -> bool:
        try:
            return (await self.page("/readyz"))[0] == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


def _lines(said: str) -> Iterator[Mapping[str, Any]]:
    """All lines but such as are being written, or that a kill has cut short."""
    for text in said.splitlines():
        if text.startswith("{") and text.endswith("}"):
            yield json.loads(text)
