"""Log lines: JSON for machines, text on a terminal, journald's priorities where it reads."""

import logging
import sys
from collections.abc import Mapping

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}

MAX_LINE = 32 * 1024


def configure(level: str, form: str, environ: Mapping[str, str]) -> None:
    """Set up structlog for the process. `form` is auto, json or text."""
    as_text = form == "text" or (form == "auto" and sys.stderr.isatty())
    processors: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        structlog.processors.format_exc_info,
    ]
    processors.append(_text if as_text else structlog.processors.JSONRenderer(default=str))
    if "JOURNAL_STREAM" in environ and not as_text:
        processors.insert(-1, _keep_level)
        processors.append(_journal)
    # grpclib tells of every cancelled call: the end of a stream is no news.
    logging.getLogger("grpclib").setLevel(logging.WARNING)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _keep_level(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """The level goes into journald's prefix as well."""
    del logger
    event["priority"] = _PRIORITY.get(method, 6)
    return event


def _journal(logger: WrappedLogger, method: str, line: EventDict | str) -> str:
    """Journald reads `<N>` at the start of a line as its priority."""
    del logger
    return f"<{_PRIORITY.get(method, 6)}>{str(line)[:MAX_LINE]}"


def _text(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """`12:00:00 info  event  key=value …`."""
    del logger
    stamp = str(event.pop("ts"))[11:19]
    name = event.pop("event")
    event.pop("level", None)
    rest = " ".join(f"{key}={value}" for key, value in sorted(event.items()))
    return f"{stamp} {method:<7} {name}  {rest}".rstrip()
