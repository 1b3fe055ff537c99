"""A Prometheus of its own on loopback, which scrapes one agent each second."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.peers.lab.control import free_ports
from tests.prometheus.lab.expressions import RULES

Json = Mapping[str, Any]

NODE: Final = "sandbox"
DEADLINE: Final = 10.0
JUDGING: Final = 100.0
"""Seconds for promtool, which takes five on an idle machine."""
PATIENCE: Final = 40.0
"""Seconds for anything that takes a few on an idle machine."""


@dataclass(frozen=True)
class Prometheus:
    """The running program."""

    address: str
    session: aiohttp.ClientSession

    async def query(self, expression: str) -> Sequence[dict[str, Any]]:
        """The series of an expression now: labels and value."""
        found = await self._get("query", query=expression)
        assert found["status"] == "success", found
        result = found["data"]["result"]
        return result if isinstance(result, list) else []

    async def alerts(self) -> Sequence[dict[str, Any]]:
        """The alerts that fire or will."""
        alerts: list[dict[str, Any]] = (await self._get("alerts"))["data"]["alerts"]
        return alerts

    async def until(self, expression: str) -> Sequence[dict[str, Any]]:
        """The series of an expression, once there are any; none if that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while not (found := await self.query(expression)):  # noqa: ASYNC110 -- another process
                    await asyncio.sleep(0.2)
                return found
        return []

    async def ready(self) -> None:
        """Return once it answers. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with self.session.get(f"{self.address}/-/ready") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.1)

    async def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        url = f"{self.address}/api/v1/{what}"
        async with asyncio.timeout(DEADLINE), self.session.get(url, params=parameters) as answer:
            found: dict[str, Any] = await answer.json()
            return found


def own_job(target: str) -> Json:
    """The scrape configuration of one agent at host:port, as GUIDE.md has it."""
    return {
        "job_name": "hami-agent",
        "honor_labels": True,
        "static_configs": [{"targets": [target], "labels": {"node": NODE}}],
    }


@contextlib.asynccontextmanager
async def open_prometheus(folder: Path, *jobs: Json) -> AsyncIterator[Prometheus]:
    """Start it over the jobs, with the shipped rules; end it afterwards."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": jobs,
    }
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(config))  # JSON is YAML
    (port,) = free_ports(1)
    with (folder / "prometheus.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        async with aiohttp.ClientSession() as session:
            found = Prometheus(f"http://127.0.0.1:{port}", session)
            await found.ready()
            yield found
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """`promtool ARGUMENTS` to its end, with `text` as its input."""
    return subprocess.run(  # noqa: S603 -- our own arguments
        ["promtool", *arguments],  # noqa: S607 -- Debian's
        check=False,
        capture_output=True,
        text=True,
        input=text,
        timeout=JUDGING,
    )
