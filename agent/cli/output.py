"""How answers are written: the streams, tables, the terminal, and documents for programs."""

import contextlib
import datetime as dt
import errno
import io
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TextIO, TypeAlias

import msgspec
import yaml
from typing_extensions import Buffer, override

from agent.errors import cut
from agent.hami.annotations import encode_stamp
from agent.kit.timing import SystemClock
from agent.kit.units import Column
from agent.status import API_VERSION

# The three standard streams that the process inherits.


class Unwritten(Exception):  # noqa: N818 -- names what happened
    """Standard output cannot be written; the OSError that is the cause says why.

    It is no OSError itself, because argparse ignores one when it writes its help.
    """


class OwnStream(io.FileIO):
    """A standard stream that is written. `is_answer`: it raises Unwritten.

    Otherwise a failed write is dropped: the process does not end because of a log line.
    """

    is_answer = False

    @override
    def write(self, data: Buffer, /) -> int:
        try:
            if (written := super().write(data)) is not None:
                return written
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            if self.is_answer:
                raise Unwritten from error
            return memoryview(data).nbytes


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
        file = OwnStream(number, "wb", closefd=False)
        file.is_answer = name == "stdout"
        is_shown = name == "stderr" or file.isatty()
        buffer = io.BufferedWriter(file)
        text = io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=is_shown)
        setattr(sys, name, text)


def drop_output() -> None:
    """Discard the rest of the answer, so that the buffer does not fail at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


# Tables that fit the terminal. No library's: `status` also runs in the agent's image without one.

GAP: Final = "  "
LEAST: Final = 6
"""Characters to which a cell that may be cut is cut where no column can be left out."""


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """A line of titles and a line for each row, none wider than `width` if that is possible.

    It cuts cells first, then leaves columns out by their rank, which the last line names, then cuts
    cells further, and lines.
    """
    kept = list(range(len(columns)))

    while True:
        last = max(kept, key=lambda place: (columns[place].rank, place))
        is_last = columns[last].rank == 0
        titled = [[column.title for column in columns], *rows]
        sizes = {place: max(len(row[place]) for row in titled) for place in kept}
        excess = sum(sizes.values()) + len(GAP) * (len(kept) - 1) - width

        for place in sorted(kept, key=lambda place: -sizes[place]):
            if excess > 0 and (least := columns[place].least):
                least = LEAST if is_last else least
                smaller = max(min(least, sizes[place]), sizes[place] - excess)
                excess -= sizes[place] - smaller
                sizes[place] = smaller

        if excess <= 0 or is_last:
            break

        kept.remove(last)

    for row in titled:
        cells = []
        for place in kept:
            text = cut(row[place], sizes[place])
            is_right = columns[place].right
            cells.append(text.rjust(sizes[place]) if is_right else text.ljust(sizes[place]))

        yield cut(GAP.join(cells).rstrip(), width)

    if rest := [one.title for place, one in enumerate(columns) if place not in kept]:
        yield cut(f"no room for {', '.join(rest)}: see `status -o wide`", width)


NARROWEST: Final = 20
UNFOLDED: Final = 10_000
"""Columns of lines that are searched: where there is no terminal, each stays one line."""


def terminal_width(environ: Mapping[str, str], without: int = 120) -> int:
    """The width of the terminal in columns; without one COLUMNS, else `without`."""
    if sys.stdout.isatty():
        return max(NARROWEST, shutil.get_terminal_size().columns)

    given = re.fullmatch(r"[0-9]{1,6}", environ.get("COLUMNS", ""))
    return max(NARROWEST, int(given[0])) if given else without


Paint: TypeAlias = Callable[[str, str], str]
"""Gives a text a colour (red, green, yellow or faint) where the terminal takes it."""

_TOGETHER: Final = re.compile(r"(?<=\[RUNBOOK) |(?<=\d) (?=(?:s|min|h|d|MiB|GiB|%)(?!\w))")
"""The space before the id of an entry, and before a unit."""

_CODES: Final = {"red": 31, "green": 32, "yellow": 33, "faint": 2}


def painter(environ: Mapping[str, str], out: TextIO | None = None) -> Paint:
    """Paints on a terminal, unless NO_COLOR is set (https://no-color.org) or TERM is dumb."""
    is_terminal = (out or sys.stdout).isatty()
    plain = environ.get("NO_COLOR") or environ.get("TERM") == "dumb" or not is_terminal
    return lambda text, colour: text if plain else f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


class FoldedLine(msgspec.Struct, frozen=True):
    """A line for people. `hanging`: the indent of what is folded. `word`: it has `colour`."""

    text: str
    indent: int = 0
    hanging: int = 2
    word: str = ""
    colour: str = ""


def folded(lines: Iterable[FoldedLine], environ: Mapping[str, str]) -> Iterator[str]:
    """The lines, folded at the width of the terminal; without one each stays whole."""
    columns, paint = terminal_width(environ, UNFOLDED), painter(environ)
    for line in lines:
        indents = " " * min(line.indent, columns // 4), " " * min(line.hanging, columns // 3)
        first, *rest = wrapped(line.text, columns, *indents)
        if line.word:
            first = first.replace(line.word, paint(line.word, line.colour), 1)

        yield from (first, *rest)


def wrapped(text: str, width: int, first: str = "", rest: str = "  ") -> list[str]:
    """The text in lines that fit. `first`, `rest`: the indents.

    What is copied or read as one stays whole: words with hyphens, ids of the runbook, amounts.
    """
    wrapper = textwrap.TextWrapper(width, first, rest, break_on_hyphens=False)
    lines = wrapper.wrap(_TOGETHER.sub("\0", text))
    return [line.replace("\0", " ") for line in lines] or [""]


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Say on a terminal what the block waits for, and clear the line at its end."""
    sign = sys.stderr if sys.stderr.isatty() else io.StringIO()
    sign.write(f"{text} ...")
    sign.flush()
    try:
        yield
    finally:
        sign.write("\r\x1b[K")
        sign.flush()


def answer(
    form: str,
    kind: str,
    data: object,
    lines: Iterable[str],
    *,
    at: dt.datetime | None = None,
    source: str = "",
) -> None:
    """Write the answer: as a document if `form` is json or yaml, else its lines.

    `at`: when the data was made or read; None: now. `source`: where; empty: on this machine.
    """
    if form not in {"json", "yaml"}:
        sys.stdout.writelines(f"{line}\n" for line in lines)
        return

    made = encode_stamp(at or SystemClock().now())
    whole = {"apiVersion": API_VERSION, "kind": kind, "generatedAt": made}
    whole |= {"source": source} if source else {}
    text = json.dumps(msgspec.to_builtins(whole | {"data": data}), indent=2)
    if form == "yaml":
        text = yaml.safe_dump(json.loads(text), sort_keys=False).rstrip()  # without aliases

    sys.stdout.write(f"{text}\n")
