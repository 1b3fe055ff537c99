"""The arguments with which a command finds the API server, chosen as by kubectl."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent.kube.client import Connection

IN_CLUSTER: Final = "KUBERNETES_SERVICE_HOST"
NO_KUBECONFIG: Final = (
    "no kubeconfig: give --kubeconfig, set KUBECONFIG, or put one at ~/.kube/config"
)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add `--kubeconfig` and `--context`."""
    parser.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="PATH",
        help="default: KUBECONFIG, else ~/.kube/config; in a pod its service account",
    )
    parser.add_argument("--context", default="", metavar="NAME", help="context of the kubeconfig")


def connection_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Connection | None:
    """The way to the API server, chosen as by kubectl; None if there is none."""
    if args.kubeconfig is not None:
        return Connection(args.kubeconfig, context=args.context)
    listed = [part for part in environ.get("KUBECONFIG", "").split(":") if part]
    home = Path(environ["HOME"], ".kube", "config") if environ.get("HOME") else None
    if listed:
        there = (path for path in map(Path, listed) if os.access(path, os.F_OK))
        return Connection(next(there, Path(listed[0])), context=args.context)
    if home is not None and os.access(home, os.F_OK):
        return Connection(home, context=args.context)
    return Connection(environment=environ) if IN_CLUSTER in environ else None
