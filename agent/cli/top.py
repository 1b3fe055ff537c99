"""Shows `status` of this node and its containers live, as large as the terminal.

The key q or Ctrl-C ends it, and any other key reads the agent at once. Exits 3 if no agent answers.
"""

import argparse
import contextlib
import os
import select
import shutil
import sys
import termios
import tty
from collections.abc import Iterator, Mapping
from typing import Final

from agent.cli.connections import add_socket
from agent.cli.main import OK, USAGE, Subparsers, Unreachable, fail, typed
from agent.cli.output import painter, wrapped, writes_utf8
from agent.cli.status import StatusRead, StatusStyle, pod_lines, status_at, status_lines
from agent.setting import number

OPENED: Final = "\x1b[?1049h\x1b[?25l"
CLOSED: Final = "\x1b[?25h\x1b[?1049l"
"""The terminal's second screen without a cursor, and back to what was on it before."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `top`."""
    parser = subparsers.add_parser(
        "top", description=__doc__, epilog="example: hami-agent top --interval 5"
    )
    parser.add_argument(
        "--interval",
        type=typed(number(1, 3600), "a number from 1 to 3600"),
        default=2.0,
        metavar="SECONDS",
        help="seconds between two looks, 1 to 3600 (default 2)",
    )

    add_socket(parser)
    parser.add_argument("--ascii", action="store_true", help="write ASCII only")


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Show the screen until it is left; return the exit code."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return fail("top", "there is no terminal: use `hami-agent status`", USAGE)

    read, trouble, keys = status_at(args.socket), "", b"first"
    with contextlib.suppress(KeyboardInterrupt), second_screen():
        # No byte at all: the terminal is gone.
        while keys and b"q" not in keys:
            columns, height = shutil.get_terminal_size()
            plain = args.ascii or not writes_utf8()
            style = StatusStyle(columns, plain, paint=painter(environ))
            lines = list(screen_lines(read, trouble, style))

            if len(lines) > height:
                more = f"{len(lines) - height + 1} more lines: `hami-agent status --by pod`, q ends"
                lines[height - 1 :] = wrapped(more, columns)[:1]

            # A line is cleared before it is written: behind a full one the cursor is still on it.
            sys.stdout.write("\x1b[H" + "\n".join(f"\x1b[2K{line}" for line in lines) + "\x1b[J")
            sys.stdout.flush()

            keys = b"none"
            if select.select([sys.stdin], [], [], args.interval)[0]:
                keys = os.read(sys.stdin.fileno(), 64)

            try:
                read, trouble = status_at(args.socket), ""
            except Unreachable as error:
                trouble = str(error)

    return OK


def screen_lines(read: StatusRead, trouble: str, style: StatusStyle) -> Iterator[str]:
    """What is shown: the last values, and since when there are no others."""
    if trouble:
        text = f"the values are of {read.at:%H:%M:%S} UTC: {trouble}"
        yield from style.notices([(text, "bad")])

    yield from status_lines(read.found, read.at, style)
    yield ""
    yield from pod_lines(read.found, read.at, style)


@contextlib.contextmanager
def second_screen() -> Iterator[None]:
    """Take the terminal for the block: keys come one by one and unseen."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        sys.stdout.write(OPENED)
        yield
    finally:
        sys.stdout.write(CLOSED)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
