"""Where a command reads the status of a node from. Each answer names its source and its time."""

import dataclasses
import datetime as dt
from pathlib import Path
from typing import Final

from agent.cli.api_socket import Unreachable, call
from agent.codec.status_document import StatusDocument, open_envelope
from agent.core.errors import AgentError, MalformedText, cap

DEADLINE: Final = 5.0
FOUND: Final = 200


class SourceUnreachable(AgentError):  # noqa: N818 -- names what happened
    """No source answers."""


@dataclasses.dataclass(frozen=True, slots=True)
class StatusRead:
    """The status of a node. `at`: when the source made it."""

    found: StatusDocument
    at: dt.datetime
    source: str


def status_at(socket: Path) -> StatusRead:
    """The status by the agent's socket. Raises SourceUnreachable."""
    try:
        status, text = call(socket, "GET", "/api/v1/status", DEADLINE)
        if status != FOUND:
            raise SourceUnreachable(f"{socket}: {cap(text)}")
        found, at = open_envelope(text.encode(), "Status", StatusDocument)
    except Unreachable as error:
        raise SourceUnreachable(str(error)) from error
    except MalformedText as error:
        raise SourceUnreachable(f"{socket} did not answer as an agent: {error}") from error
    return StatusRead(found, at, str(socket))
