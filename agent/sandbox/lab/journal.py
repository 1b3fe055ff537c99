"""The agent's log lines from standard error, bounded, across its restarts."""

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

KEPT_LINES: Final = 5000
LASTING: Final = "web.listening"
"""An event that is logged once at the start. It is kept while the agent runs."""
MOST_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line that `pid` wrote at `elapsed`. `fields` is empty if it is not a JSON object."""

    elapsed: float
    pid: int
    text: str
    fields: Mapping[str, object] = field(default_factory=dict)

    @property
    def event(self) -> str:
        """The name of the log event."""
        return str(self.fields.get("event", ""))


class AgentLog:
    """The last lines of the agents of one sandbox. Calls `heard` after each line."""

    def __init__(self, heard: Callable[[], None]) -> None:
        self._lines: deque[LogLine] = deque(maxlen=KEPT_LINES)
        self._lasting: deque[LogLine] = deque(maxlen=KEPT_LINES)
        self._heard = heard
        self._copy: TextIO | None = None

    @contextlib.contextmanager
    def copied(self, path: Path) -> Iterator[None]:
        """Write the kept lines, and new ones while the block lasts, to a file. Raises OSError."""
        with path.open("w", encoding="utf-8") as copy:
            self._copy = copy
            try:
                for line in self:
                    self._write(line)
                yield
            finally:
                self._copy = None

    def add(self, elapsed: float, pid: int, line: bytes) -> None:
        """Keep one line."""
        text = line[:MOST_BYTES].decode(errors="replace").rstrip()
        found = LogLine(elapsed, pid, text, _parsed(text))
        self._lines.append(found)
        if found.event == LASTING:
            self._lasting.append(found)
        self._write(found)
        self._heard()

    def of(self, event: str, pid: int | None = None) -> list[LogLine]:
        """The kept lines with that event, of one process or of all."""
        lines = self._lasting if event == LASTING else self._lines
        return [line for line in lines if line.event == event and (pid is None or line.pid == pid)]

    def last(self, count: int) -> list[str]:
        """The text of the last `count` lines."""
        return [line.text for line in self._lines][-count:]

    def _write(self, line: LogLine) -> None:
        if self._copy is not None:
            self._copy.write(f"{line.text}\n")
            self._copy.flush()

    def __iter__(self) -> Iterator[LogLine]:
        return iter(tuple(self._lines))


def _parsed(text: str) -> Mapping[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
