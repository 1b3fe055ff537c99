"""Formats log lines: JSON for machines, text on a terminal, with priorities for journald.

Values may contain foreign names and messages. In text, none contains a line break or a control
character: one event is one line, and a traceback is indented.
"""

import logging
import sys
from collections.abc import Callable, Mapping

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger
from typing_extensions import override

from agent.errors import cap, cut

_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}  # of syslog
MAX_LINE = 32 * 1024  # characters of a line for journald
VALUE_LIMIT = 16 * 1024
"""Characters of one value, or of all entries of a list or table. The register annotation of 16 GPUs
fits beside others."""
ITEMS_LIMIT = 64  # entries of a list or table
TRACE_LINES = 100  # last lines of a traceback: the error is at the end

Clean = Callable[[str, int], str]
"""Makes a text safe to print, in at most so many characters."""


def configure(level: str, form: str, environ: Mapping[str, str]) -> None:
    """Set up structlog for the process. `form` is auto, json or text."""
    as_text = form == "text" or (form == "auto" and sys.stderr.isatty())
    processors: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        structlog.processors.format_exc_info,
        _Cleaner(cap if as_text else cut),  # JSON escapes control characters
    ]
    processors.append(_text if as_text else structlog.processors.JSONRenderer(default=str))
    if "JOURNAL_STREAM" in environ and not as_text:
        processors.append(_journal)

    # grpclib logs every cancelled call, such as the normal end of a stream.
    logging.getLogger("grpclib").setLevel(logging.WARNING)

    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )

    logging.basicConfig(level=logging.WARNING, handlers=[_Libraries()])


class _Libraries(logging.Handler):
    """Turns log records of libraries into log lines."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            log = structlog.get_logger(record.name)
            write = log.error if record.levelno >= logging.ERROR else log.warning
            text = record.getMessage()
            write("library.said", library=record.name, text=text, exc_info=record.exc_info)
        except Exception:  # noqa: BLE001 -- a handler must not raise into the code that logs
            self.handleError(record)


class _Cleaner:
    """Makes every value safe to print; values of unknown types become text."""

    def __init__(self, clean: Clean) -> None:
        self._clean = clean

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {
            key: self._trace(str(value)) if key == "exception" else self._fit(value, VALUE_LIMIT)
            for key, value in event.items()
        }

    def _fit(self, value: object, limit: int) -> object:
        match value:
            case None | bool() | int() | float():
                return value
            case Mapping():
                items = list(value.items())[:ITEMS_LIMIT]
                each = 1 + limit // max(2 * len(items), 1)
                return {self._clean(str(key), each): self._fit(item, each) for key, item in items}
            case list() | tuple() | set() | frozenset():
                entries = list(value)[:ITEMS_LIMIT]
                each = 1 + limit // max(len(entries), 1)
                return [self._fit(entry, each) for entry in entries]
            case _:
                return self._clean(str(value), limit)

    def _trace(self, text: str) -> str:
        most = MAX_LINE // TRACE_LINES
        # Cleaning takes the indentation of a line away.
        return "\n".join(
            cut(line, most) if line.isprintable() else self._clean(line, most)
            for line in text.splitlines()[-TRACE_LINES:]
        )


def _journal(_logger: WrappedLogger, method: str, line: EventDict | str) -> str:
    """Put `<N>` before the line, which journald reads as its priority."""
    return f"<{_PRIORITY.get(method, 6)}>{str(line)[:MAX_LINE]}"


def _text(_logger: WrappedLogger, method: str, event: EventDict) -> str:
    stamp = str(event.pop("ts"))[11:19]
    name = event.pop("event")
    event.pop("level", None)
    trace = "".join(f"\n    | {line}" for line in event.pop("exception", "").splitlines())
    rest = " ".join(f"{key}={value}" for key, value in sorted(event.items()))

    return f"{stamp} {method:<7} {name}  {rest}".rstrip() + trace
