"""What the output can show."""

import contextlib
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Final

NARROWEST: Final = 20
WITHOUT: Final = 120
"""Columns where there is no terminal and COLUMNS is not set."""
UNFOLDED: Final = 10_000
"""Columns of lines that are searched: where there is no terminal, each stays one line."""
_NUMBER: Final = re.compile(r"[0-9]{1,6}")


def terminal_width(environ: Mapping[str, str], without: int = WITHOUT) -> int:
    """The width of the terminal in columns; without one COLUMNS, else `without`."""
    if sys.stdout.isatty():
        return max(NARROWEST, shutil.get_terminal_size().columns)
    given = environ.get("COLUMNS", "")
    return max(NARROWEST, int(given)) if _NUMBER.fullmatch(given) else without


def writes_utf8() -> bool:
    """Whether standard output takes characters beyond ASCII."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Say on a terminal what the block waits for, and clear the line at its end."""
    if not sys.stderr.isatty():
        yield
        return
    sys.stderr.write(f"{text} ...")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
