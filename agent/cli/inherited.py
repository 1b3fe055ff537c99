"""Repairs what a process inherits: its three standard streams and the action of SIGINT."""

import contextlib
import io
import os
import signal
import sys
from typing import TextIO

from typing_extensions import override


class Unwritten(OSError):  # noqa: N818 -- names what happened
    """Standard output cannot be written; errno and strerror say why."""


class _Answers(io.TextIOWrapper):
    """Standard output. A failed write raises Unwritten, and flush() raises it again.

    argparse ignores a failed write of its help, so flush() must repeat it.
    """

    failure: Unwritten | None = None

    @override
    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise self._lost(error) from error

    @override
    def flush(self) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            super().flush()
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> Unwritten:
        self.failure = Unwritten(error.errno, error.strerror)
        return self.failure


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
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # the readers of the text refuse other bytes
    sys.stdout = _own(sys.stdout, 1, _Answers)
    sys.stderr = _own(sys.stderr, 2, _Messages)


def drop_output() -> None:
    """Discard the rest of the answer, so that the buffer does not fail at exit."""
    if isinstance(sys.stdout, _Answers):
        sys.stdout.failure = None
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def own_signals() -> None:
    """Let SIGINT interrupt, even if the parent ignored it.

    A shell without job control starts `command &` with SIGINT ignored, and Python keeps that:
    neither Ctrl-C nor `kill -INT` would end the process.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _own(stream: TextIO, number: int, kind: type[io.TextIOWrapper]) -> io.TextIOWrapper:
    """The stream as a `kind`; it writes characters that its encoding lacks as escapes."""
    if not isinstance(stream, io.TextIOWrapper):  # None: the parent closed it
        raw = io.FileIO(number, "w", closefd=False)
        return kind(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace")
    return kind(
        stream.buffer,
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
