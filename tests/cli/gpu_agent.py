"""An agent's socket on which every action to a GPU is answered alike, and the verbs that ask it."""

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import structlog
from aiohttp import web

from agent.web.server import Listeners, serve_pages


class ToldGpu:
    """Stands for the agent's actions: answers every POST alike.

    `asked`: the paths. `targets`: the same with the query.
    """

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text
        self.asked: list[str] = []
        self.targets: list[str] = []

    async def answer(self, request: web.BaseRequest) -> web.Response:
        self.asked.append(request.path)
        self.targets.append(request.path_qs)
        return web.Response(status=self.status, text=self.text)


@contextlib.asynccontextmanager
async def an_agent(
    path: Path, kind: str, data: Mapping[str, Any], status: int = 200, raw: str | None = None
) -> AsyncIterator[ToldGpu]:
    """Answers with a document of that kind, or with `raw`."""
    text = json.dumps({"apiVersion": "hami-agent/v1", "kind": kind, "data": data})
    told = ToldGpu(status, text if raw is None else raw)
    with structlog.testing.capture_logs():
        async with serve_pages(Listeners(port=None, socket_path=path), {}, told.answer):
            yield told


async def run(verb: ModuleType, name: str, *argv: object) -> int:
    """The exit code of that verb."""
    parser = argparse.ArgumentParser(prog="hami-agent")
    verb.add_parser(parser.add_subparsers(dest="verb"))
    args = parser.parse_args([name, *map(str, argv)])
    code: int = await asyncio.to_thread(verb.main, args, {})
    return code
