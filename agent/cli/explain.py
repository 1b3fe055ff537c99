"""`hami-agent explain`: why a pod is where it is, gate by gate, and what would place it."""

import argparse
import asyncio
import random
import sys
from collections.abc import Mapping, Sequence

from agent.app.explaining import read_cluster, read_refused
from agent.cli.arguments import TABLE, add_output
from agent.cli.cluster_args import NO_KUBECONFIG, add_cluster, connection_of
from agent.cli.codes import INCOMPLETE, NOT_FOUND, OK, PROBLEM, UNREACHABLE, USAGE, fail
from agent.cli.documents import document
from agent.cli.explain_recent import recent_data, recent_text
from agent.cli.explain_view import explanation_data, rendered
from agent.cli.logs import configure
from agent.cli.main import Subparsers
from agent.cli.terminal import UNFOLDED, terminal_width, working
from agent.core.cluster.snapshot import ClusterSnapshot, RefusedPod
from agent.core.errors import ApiError, SettingsError, cap
from agent.host.clock import SystemClock
from agent.host.kube.cluster.reader import NoSuchPod
from agent.host.kube.connection import Connection, default_namespace
from agent.sandbox.explain.decide import explain_pod
from agent.sandbox.scheduler.model import SchedulerSettings


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `explain`."""
    parser = subparsers.add_parser(
        "explain",
        help="explain why a pod is pending or refused, gate by gate",
        description="Explains a pod gate by gate: admission, quota, placement with the figures of "
        "each GPU, binding with the node lock, allocation, start, and what it holds. Then it names "
        "the smallest changes that would place the pod, each tried with a model of HAMi's "
        "scheduler. It reads Pods, Nodes, Events and ResourceQuotas of the API server, writes "
        "nothing and needs no agent. Exits 0 if nothing blocks the pod, 1 if something does, 3 if "
        "the API server cannot be read, 4 if there is no such pod, 5 if a part of the data is "
        "missing.",
        epilog="example: hami-agent explain team-a/train-0 --kubeconfig ~/.kube/config",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("pod", nargs="?", metavar="[NAMESPACE/]POD", help="the pod")
    what.add_argument(
        "--recent",
        action="store_true",
        help="list the pods that kubelets refused because of their GPUs, the last first, each with "
        "the id of the refusal; of all namespaces, or of the one that -n names",
    )
    parser.add_argument("-n", "--namespace", metavar="NAME", help="the pod's namespace")
    add_cluster(parser)
    parser.add_argument(
        "--scheduler-name",
        default=SchedulerSettings().scheduler_name,
        metavar="NAME",
        help="name of HAMi's scheduler (default %(default)s)",
    )
    add_output(parser)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the explanation and return the exit code."""
    configure("error", "auto", environ)
    namespace, name, mistake = ("", "", "") if args.recent else _named(args)
    if mistake:
        return fail("explain", mistake, USAGE)
    connection = connection_of(args, environ)
    if connection is None:
        return fail("explain", NO_KUBECONFIG, UNREACHABLE)
    try:
        columns = terminal_width(environ, UNFOLDED)
        return _answer(args, connection, namespace, name, columns)
    except (SettingsError, ApiError) as error:
        advice = ": give --kubeconfig, or set KUBECONFIG"
        is_ours = isinstance(error, SettingsError)
        return fail("explain", f"{error.said}{advice}" if is_ours else str(error), UNREACHABLE)


def _answer(
    args: argparse.Namespace, connection: Connection, namespace: str, name: str, columns: int
) -> int:
    """Print the answer and return the exit code. Raises SettingsError, ApiError."""
    clock = SystemClock()
    if args.recent:
        with working("reading pods and Events"):
            refused = asyncio.run(read_refused(connection, args.namespace or "", clock))
        return _write_recent(args, connection, refused, clock, columns)
    namespace = namespace or default_namespace(connection)
    with working("reading the pod, Nodes and pods with GPUs"):
        found = asyncio.run(read_cluster(connection, namespace, name, clock))
    if isinstance(found, NoSuchPod):
        return fail("explain", _missing(found, namespace, name), NOT_FOUND)
    return _write(args, connection, found, clock, columns)


def _write(
    args: argparse.Namespace,
    connection: Connection,
    found: ClusterSnapshot,
    clock: SystemClock,
    columns: int,
) -> int:
    settings = SchedulerSettings(scheduler_name=args.scheduler_name)
    now = clock.now()
    chance = random.Random(0)  # noqa: S311 -- breaks ties
    with working(f"trying changes on {len(found.nodes)} Nodes"):
        explanation = explain_pod(found, now, chance, settings)
    source = f"API server by {connection.source}"
    if args.output == TABLE:
        sys.stdout.write(rendered(explanation, source, now, columns))
    else:
        data = explanation_data(explanation)
        sys.stdout.write(document("Explanation", data, args.output, found.taken, source))
    if explanation.missing:
        return INCOMPLETE
    return PROBLEM if explanation.is_blocked else OK


def _write_recent(
    args: argparse.Namespace,
    connection: Connection,
    refused: Sequence[RefusedPod],
    clock: SystemClock,
    columns: int,
) -> int:
    source, now = f"API server by {connection.source}", clock.now()
    if args.output == TABLE:
        sys.stdout.write(recent_text(refused, source, now, columns))
    else:
        sys.stdout.write(document("Refusals", recent_data(refused), args.output, now, source))
    return OK


def _named(args: argparse.Namespace) -> tuple[str, str, str]:
    """Namespace (empty: the context's), name, and what is wrong with them."""
    space, slash, name = args.pod.rpartition("/")
    if not name or "/" in space or (slash and not space):
        return "", "", f"{cap(args.pod, 64)!r} is not a pod: write POD or NAMESPACE/POD"
    if space and args.namespace and args.namespace != space:
        return "", "", f"two namespaces: {cap(space, 64)} and {cap(args.namespace, 64)}"
    return space or args.namespace or "", name, ""


def _missing(found: NoSuchPod, namespace: str, name: str) -> str:
    text = f"there is no pod {cap(name, 256)} in the namespace {cap(namespace, 64)}"
    if found.elsewhere:
        text += f"; one is in {', '.join(cap(space, 64) for space in found.elsewhere)}"
    if found.nearest:
        text += f"; the nearest names are {', '.join(cap(near, 256) for near in found.nearest)}"
    if found.unread:
        text += f"; no other name is known: {found.unread}"
    return text
