"""`hami-agent cordon`: keeps HAMi's scheduler from placing new pods on a GPU."""

import argparse
from collections.abc import Mapping

from agent.cli.cordon_gpu import CODES, add_arguments, change
from agent.cli.main import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `cordon`."""
    parser = subparsers.add_parser(
        "cordon",
        help="place no new pods on a GPU",
        description="Writes the GPU into the Node's annotation hami.io/device-cordon, so that "
        "HAMi's scheduler (2.10 and later) places no new pods on it. Pods that run there go on, "
        "and the agent and the kubelet offer its slices as before. It asks first. " + CODES,
        epilog="example: hami-agent cordon 3 --node gpu-1",
    )
    add_arguments(parser)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the verb; return the exit code."""
    return change(args, environ, cordon=True)
