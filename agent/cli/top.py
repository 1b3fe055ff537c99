"""Shows a live screen of the running agent: what `status` shows, and the containers with slices.

Keys: / filters the containers, Esc shows all again, s sorts them by the next column, q quits. It
needs the extra `cli` of the package; in the agent's image use `status`. Exits 3 if no agent
answers.
"""

import argparse
import importlib.util
import sys
from collections.abc import Mapping

from agent.cli.connections import add_socket
from agent.cli.main import OK, USAGE, Subparsers, fail, typed
from agent.cli.status import status_at
from agent.setting import number


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
    del environ
    if importlib.util.find_spec("textual") is None:
        text = "the package is installed without its extra `cli`: run `uv sync --extra cli` in its"
        return fail("top", f"{text} source directory, or use `hami-agent status`", USAGE)

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return fail("top", "there is no terminal: use `hami-agent status`", USAGE)

    first = status_at(args.socket)
    from agent.cli.top_screen import TopScreen  # noqa: PLC0415 -- only with the extra

    TopScreen(lambda: status_at(args.socket), first, interval=args.interval, plain=args.ascii).run()
    return OK
