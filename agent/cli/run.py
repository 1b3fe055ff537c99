"""Runs the agent on this node until SIGTERM.

Settings files are read again when they change, and on SIGHUP.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping

from agent.app.main import run_agent
from agent.cli.config import add_settings, sources, started
from agent.cli.main import Subparsers
from agent.errors import SettingsError
from agent.kit.logs import configure


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `run`."""
    parser = subparsers.add_parser(
        "run",
        description=__doc__,
        epilog="example: hami-agent run --config /etc/hami-agent/config.yaml --simulate h100:8",
    )
    add_settings(parser)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the agent and return its exit code."""
    origin = sources(args, environ)
    try:
        start = asyncio.run(started(origin))
        settings = start.taken().settings()
    except SettingsError as error:
        sys.stderr.write(f"hami-agent: {error}\n")
        return error.exit_code

    configure(settings.log_level, settings.log_format, environ)

    return asyncio.run(run_agent(origin, start, settings))
