"""`hami-agent version`: prints the versions of the agent and Python."""

import argparse
import platform
import sys
from collections.abc import Mapping

from agent import __version__
from agent.cli.arguments import TABLE, add_output
from agent.cli.codes import OK
from agent.cli.main import Subparsers
from agent.cli.output import document
from agent.host.process import SystemClock


def add_parser(subparsers: Subparsers) -> None:
    """The verb `version`."""
    parser = subparsers.add_parser(
        "version", help="print the version", epilog="example: hami-agent version -o json"
    )
    add_output(parser)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the agent's and Python's versions."""
    del environ
    facts = {
        "version": __version__,
        "python": platform.python_version(),
        "registerProfile": "json",
        "stateVersion": 1,
    }
    if args.output != TABLE:
        sys.stdout.write(document("Version", facts, args.output, SystemClock().now()))
    else:
        sys.stdout.write(
            f"hami-agent {facts['version']} (Python {facts['python']}, register annotation "
            f"{facts['registerProfile']}, state version {facts['stateVersion']})\n"
        )
    return OK
