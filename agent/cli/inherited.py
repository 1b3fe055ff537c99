"""Repairs the three standard streams that a process inherits."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator

from typing_extensions import override


class Unwritten(Exception):  # noqa: N818 -- names what happened
    """Standard output cannot be written; the OSError that is the cause says why.

    It is no OSError itself, because argparse ignores one when it writes its help.
    """


class _Stream(io.TextIOWrapper):
    """A standard stream that is written.

    `is_answer`: it raises Unwritten. Otherwise a failed write is dropped: the process does not end
    because of a log line.
    """

    is_answer = False

    @override
    def write(self, text: str, /) -> int:
        with self._failing():
            super().write(text)

        return len(text)

    @override
    def flush(self) -> None:
        with self._failing():
            super().flush()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.is_answer:
                raise Unwritten from error


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
    for number, name in ((1, "stdout"), (2, "stderr")):
        encoding = getattr(getattr(sys, name), "encoding", "utf-8")  # None: the parent closed it
        file = os.fdopen(number, "wb", closefd=False)
        is_shown = name == "stderr" or file.isatty()
        stream = _Stream(file, encoding, "backslashreplace", line_buffering=is_shown)
        stream.is_answer = name == "stdout"
        setattr(sys, name, stream)


def drop_output() -> None:
    """Discard the rest of the answer, so that the buffer does not fail at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
