"""How a verb reaches the running agent, by its socket, and the API server, by a kubeconfig."""

import argparse
import asyncio
import contextlib
import http.client
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from agent.cli.main import Unreachable
from agent.errors import ApiError, SettingsError
from agent.kube.client import Connection, KubeSession, check

R = TypeVar("R")

DEFAULT_SOCKET: Final = Path("/run/hami-agent/api.sock")

ANSWER_LIMIT: Final = 8 * 1024 * 1024
"""Bytes that are read of an answer."""


def add_socket(parser: argparse._ActionsContainer) -> None:
    """Add `--socket`."""
    told = f"the agent's socket (default {DEFAULT_SOCKET})"
    parser.add_argument("--socket", type=Path, default=DEFAULT_SOCKET, metavar="PATH", help=told)


def call(path: Path, method: str, target: str, timeout: float) -> tuple[int, str]:
    """Send a request; return the status and text of the answer. Raises Unreachable."""
    connection = http.client.HTTPConnection("localhost")
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(timeout)
        connection.sock.connect(str(path))
        connection.request(method, target)
        answer = connection.getresponse()

        return answer.status, answer.read(ANSWER_LIMIT).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        said = f"{path} does not answer ({reason}); is the agent running? may you use it?"
        raise Unreachable(said) from error
    finally:
        connection.close()


# The API server, chosen as by kubectl.

IN_CLUSTER: Final = "KUBERNETES_SERVICE_HOST"
"""The variable that a kubelet sets in each pod."""


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add `--kubeconfig` and `--context`."""
    told = "default: KUBECONFIG, else ~/.kube/config; in a pod its service account"
    parser.add_argument("--kubeconfig", type=Path, metavar="PATH", help=told)
    parser.add_argument("--context", default="", metavar="NAME", help="context of the kubeconfig")


def connection_of(kubeconfig: Path | None, context: str, environ: Mapping[str, str]) -> Connection:
    """The way to the API server, chosen as by kubectl. Raises Unreachable: there is none."""
    listed = [Path(part) for part in environ.get("KUBECONFIG", "").split(":") if part]
    home = [Path(environ["HOME"], ".kube", "config")] if environ.get("HOME") else []
    there = [path for path in listed or home if os.access(path, os.F_OK)]
    chosen = kubeconfig or next(iter((*there, *listed)), None)
    if chosen is None and IN_CLUSTER not in environ:
        raise Unreachable(
            "no kubeconfig: give --kubeconfig, set KUBECONFIG, or make ~/.kube/config"
        )
    remedy = "give --kubeconfig, or set KUBECONFIG"
    return Connection(chosen, environment=environ, context=context, remedy=remedy)


@contextlib.asynccontextmanager
async def open_session(connection: Connection, program: str) -> AsyncIterator[KubeSession]:
    """A session with the API server for the block. Raises SettingsError: its files are no use."""
    check(connection)
    session = KubeSession(connection, random.SystemRandom(), program)
    try:
        yield session
    finally:
        await session.close()


def ask(connection: Connection, program: str, read: Callable[[KubeSession], Awaitable[R]]) -> R:
    """What a session with the API server reads. Raises Unreachable, and what else `read` raises."""

    async def asked() -> R:
        async with open_session(connection, program) as session:
            return await read(session)

    try:
        return asyncio.run(asked())
    except (SettingsError, ApiError) as error:
        raise Unreachable(str(error)) from error
