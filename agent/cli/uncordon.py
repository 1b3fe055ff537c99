"""`hami-agent uncordon`: ends the cordon of a GPU."""

import argparse
from collections.abc import Mapping

from agent.cli.cordon_gpu import CODES, add_arguments, change
from agent.cli.main import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `uncordon`."""
    parser = subparsers.add_parser(
        "uncordon",
        help="let new pods be placed on a cordoned GPU again",
        description="Removes the GPU from the Node's annotation hami.io/device-cordon, so that "
        "HAMi's scheduler may place new pods on it again. It asks first. " + CODES,
        epilog="example: hami-agent uncordon 3 --node gpu-1",
    )
    add_arguments(parser)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the verb; return the exit code."""
    return change(args, environ, cordon=False)
