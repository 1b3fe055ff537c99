"""What a process is born with and cannot count on: its three streams, and what signals do."""

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
    """Standard output. Its failure is told from that of any other file, and by `flush` once more.

    argparse passes over a failed write of its help.
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
    """Standard error: what cannot be written is dropped. No log line is worth the process."""

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
    """Take over the standard streams, and open those that were closed by the parent.

    A number that is free would go to the next file or socket, and what is printed into it. From a
    stream that was closed nothing is read. A write to standard output fails then, because an answer
    that nobody gets is no success.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # it gets the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # other bytes are refused by what reads the text
    sys.stdout = _own(sys.stdout, 1, _Answers)
    sys.stderr = _own(sys.stderr, 2, _Messages)


def drop_output() -> None:
    """Nobody gets the rest of the answer: what is still buffered must not fail at the exit."""
    if isinstance(sys.stdout, _Answers):
        sys.stdout.failure = None
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def own_signals() -> None:
    """Let SIGINT interrupt, whatever was inherited.

    A shell without job control starts `command &` with SIGINT ignored, and Python then leaves it
    so: neither Ctrl-C nor `kill -INT` would end the process.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _own(stream: TextIO, number: int, kind: type[io.TextIOWrapper]) -> io.TextIOWrapper:
    """The stream as one of `kind`. A character that its encoding lacks is written as an escape."""
    if not isinstance(stream, io.TextIOWrapper):  # None: it was closed
        raw = io.FileIO(number, "w", closefd=False)
        return kind(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace")
    return kind(
        stream.buffer,
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
