"""Calls the running agent by its unix socket."""

import argparse
import http.client
import socket
from pathlib import Path
from typing import Final

from typing_extensions import override

from agent.errors import AgentError

DEFAULT_SOCKET: Final = Path("/run/hami-agent/api.sock")
ANSWER_LIMIT: Final = 8 * 1024 * 1024


class Unreachable(AgentError):  # noqa: N818 -- the state, not the call, is the error
    """The agent does not answer at the socket."""


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    @override
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def add_socket(parser: argparse._ActionsContainer) -> None:
    """Add `--socket`."""
    parser.add_argument(
        "--socket",
        type=Path,
        default=DEFAULT_SOCKET,
        metavar="PATH",
        help=f"the agent's socket (default {DEFAULT_SOCKET})",
    )


def call(path: Path, method: str, target: str, timeout: float) -> tuple[int, str]:
    """Send a request; return the status and text of the answer. Raises Unreachable."""
    connection = _UnixConnection(path, timeout)
    try:
        connection.request(method, target)
        answer = connection.getresponse()
        return answer.status, answer.read(ANSWER_LIMIT).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise Unreachable(
            f"{path} does not answer ({reason}); is the agent running, and may you use its socket?"
        ) from error
    finally:
        connection.close()
