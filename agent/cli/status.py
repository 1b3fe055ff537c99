"""`hami-agent status`: the node, its GPUs, who holds them, and what happened."""

import argparse
import datetime as dt
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent.app.observing import NoSuchNode
from agent.cli.api_socket import add_socket
from agent.cli.arguments import TABLE, add_output, nearest
from agent.cli.cluster_args import add_cluster
from agent.cli.codes import INCOMPLETE, NOT_FOUND, OK, UNREACHABLE, USAGE, fail
from agent.cli.documents import document
from agent.cli.logs import configure
from agent.cli.main import Subparsers
from agent.cli.sources import SourceUnreachable, StatusRead, status_at, status_in, status_of
from agent.cli.status_view import (
    StatusStyle,
    entry_lines,
    pod_lines,
    stamp,
    status_lines,
    wrapped,
)
from agent.cli.terminal import terminal_width, writes_utf8
from agent.codec.status_document import StatusDocument, names_of
from agent.core.errors import AgentError, cap
from agent.core.inventory.slices import SharingSettings
from agent.host.clock import SystemClock
from agent.settings.fields import seconds_of

RESOURCE: Final = SharingSettings().resource
OF_NODE: Final = ("objects", "resource", "kubeconfig", "context")
"""Options that only --node uses."""
DAY: Final = 24 * 3600
"""Seconds for which an agent knows what happened."""


class GpuNotFound(AgentError):  # noqa: N818 -- names what happened
    """The node has no GPU of that name."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `status`."""
    parser = subparsers.add_parser(
        "status",
        help="show a node: GPUs, their health, who holds them, what changed",
        description="Shows the node as the running agent sees it: readiness, the health of each "
        "GPU and what to do, what was promised to pods and what is used, and the last refusal. "
        "With --since it also shows what was refused and what changed. With --node it reads a node "
        "of the cluster by a kubeconfig, also one whose agent does not answer. Exits 3 if the "
        "source does not answer, 4 if there is no such GPU or node, and 5 if only the objects "
        "could be read.",
        epilog="example: hami-agent status --since 24h",
    )
    parser.add_argument("gpu", nargs="?", metavar="GPU", help="only this GPU: index or UUID")
    parser.add_argument(
        "--by", choices=("gpu", "pod"), default="gpu", help="what a line of the table is"
    )
    parser.add_argument(
        "--since",
        type=_age,
        metavar="DURATION",
        help="also show refusals and changes of that time, at most 24h",
    )
    source = parser.add_mutually_exclusive_group()
    add_socket(source)
    source.add_argument(
        "--from",
        dest="bundle",
        type=Path,
        metavar="FILE",
        help="read an archive of `hami-agent bundle` instead",
    )
    source.add_argument(
        "--node",
        metavar="NAME",
        help="a node of the cluster: its agent through the API server, else its objects",
    )
    parser.add_argument(
        "--objects",
        action="store_true",
        help="with --node: what HAMi's scheduler reads, the objects, also where an agent answers",
    )
    parser.add_argument(
        "--resource",
        metavar="NAME",
        help=f"with --node: the resource name of slices (default {RESOURCE})",
    )
    add_cluster(parser)
    parser.add_argument("--ascii", action="store_true", help="write ASCII only")
    add_output(parser, forms=(TABLE, "wide", "json", "yaml", "name"))


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the status; return the exit code."""
    if args.node is None and (unused := [f"--{name}" for name in OF_NODE if vars(args)[name]]):
        text = f"{', '.join(unused)}: without --node no API server is read; give --node NAME"
        return fail("status", text, USAGE)
    configure("error", "auto", environ)
    try:
        read = _read(args, environ)
        found = read.found if args.gpu is None else only(read.found, args.gpu)
    except SourceUnreachable as error:
        return fail("status", str(error), UNREACHABLE)
    except (GpuNotFound, NoSuchNode) as error:
        return fail("status", str(error), NOT_FOUND)
    sys.stdout.writelines(_written(msgspec.structs.replace(read, found=found), args, environ))
    if read.missing:
        return fail("status", read.missing, INCOMPLETE)
    return OK


def _read(args: argparse.Namespace, environ: Mapping[str, str]) -> StatusRead:
    """Read the source that the arguments choose. Raises SourceUnreachable, NoSuchNode."""
    if args.bundle is not None:
        return status_in(args.bundle)
    if args.node is not None:
        return status_of(args.node, args.resource or RESOURCE, args, environ)
    return status_at(args.socket)


def only(found: StatusDocument, name: str) -> StatusDocument:
    """The status of one GPU and of the pods that hold it. Raises GpuNotFound."""
    gpu = next((gpu for gpu in found.gpus if name in names_of(gpu)), None)
    if gpu is None:
        known = [str(gpu.uuid if gpu.index is None else gpu.index) for gpu in found.gpus]
        uuids = [gpu.uuid for gpu in found.gpus]
        there = ", ".join(known) or "none"
        raise GpuNotFound(f"no GPU is named {cap(name, 64)}{nearest(name, uuids)}; GPUs: {there}")
    holds = [
        one
        for one in found.allocations or ()
        if any(share.uuid == gpu.uuid for share in one.shares)
    ]
    return msgspec.structs.replace(found, gpus=(gpu,), allocations=tuple(holds))


def names(found: StatusDocument, *, by: str) -> Iterator[str]:
    """The names of the GPUs, or of the pods that hold slices, for scripts."""
    if by == "gpu":
        yield from (f"gpu/{gpu.uuid}" for gpu in found.gpus)
    else:
        pods = ((one.namespace, one.pod) for one in found.allocations or () if one.pod)
        yield from (f"pod/{namespace}/{pod}" for namespace, pod in dict.fromkeys(pods))


def _written(
    read: StatusRead, args: argparse.Namespace, environ: Mapping[str, str]
) -> Iterator[str]:
    """The output in the form that was asked for."""
    form = args.output
    if form in {"json", "yaml"}:
        yield document("Status", read.found, form, read.at, read.source)
    elif form == "name":
        yield from (f"{name}\n" for name in names(read.found, by=args.by))
    else:
        style = StatusStyle(
            terminal_width(environ), args.ascii or not writes_utf8(), form == "wide"
        )
        yield from (f"{line}\n" for line in _lines(read.found, args, read.at, style))
        now = SystemClock().now()
        seconds = max(0, round((now - read.at).total_seconds()))
        source = f"source: {read.source}, {seconds} s old"
        yield from (f"{line}\n" for line in wrapped(source, style))


def _lines(
    found: StatusDocument, args: argparse.Namespace, at: dt.datetime, style: StatusStyle
) -> Iterator[str]:
    if args.by == "pod":
        yield from pod_lines(found.allocations or (), at, style)
    else:
        yield from status_lines(found, at, style)
    if args.gpu is not None and args.by == "gpu":
        yield ""
        yield from pod_lines(found.allocations or (), at, style)
    if args.since is not None:
        oldest = at - args.since
        for title, entries in (("refusals", found.refusals), ("changes", found.changes)):
            recent = [entry for entry in entries or () if entry.at >= oldest]
            yield ""
            yield from entry_lines(title, recent, at, style)
        if found.journal_since is not None and at >= found.journal_since > oldest:
            since = stamp(found.journal_since)
            yield from wrapped(f"(known since {since}; the agent's log has earlier ones)", style)


def _age(text: str) -> dt.timedelta:
    seconds = seconds_of(text)
    if seconds is None:
        raise argparse.ArgumentTypeError(f"{cap(text, 64)!r} is not a duration such as 30m or 24h")
    if seconds > DAY:
        raise argparse.ArgumentTypeError(f"{cap(text, 64)!r} is longer than 24h; see the log")
    return dt.timedelta(seconds=seconds)
