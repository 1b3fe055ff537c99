"""Repairs the three standard streams that a process inherits."""

import contextlib
import io
import os
import sys

from typing_extensions import override


class Unwritten(Exception):  # noqa: N818 -- names what happened
    """Standard output cannot be written; the OSError that is the cause says why.

    It is no OSError itself, because argparse ignores one when it writes its help.
    """


class _Answers(io.TextIOWrapper):
    """Standard output. Raises Unwritten."""

    @override
    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise Unwritten from error

    @override
    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise Unwritten from error


class _Messages(io.TextIOWrapper):
    """Standard error. A failed write is dropped: the process does not end because of a log line."""

    @override
    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            super().write(text)

        return len(text)

    @override
    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def own_streams() -> None:
    """Replace the standard streams, and open those that the parent closed.

    The next file or socket would get a free number, and prints would go into it. A closed stdin
    reads as empty. A closed stdout fails every write: an answer that is lost is no success.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # it gets the lowest free number, which is this one

    # The readers of the text refuse bytes that are no characters.
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="replace", closefd=False)
    for number, name, kind in ((1, "stdout", _Answers), (2, "stderr", _Messages)):
        encoding = getattr(getattr(sys, name), "encoding", "utf-8")  # None: the parent closed it
        file = os.fdopen(number, "wb", closefd=False)
        is_shown = kind is _Messages or file.isatty()
        stream = kind(file, encoding, "backslashreplace", line_buffering=is_shown)
        setattr(sys, name, stream)


def drop_output() -> None:
    """Discard the rest of the answer, so that the buffer does not fail at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
