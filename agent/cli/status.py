"""`hami-agent status` and `top`: the node, its GPUs, who holds them, and what happened.

The status is read at the agent's socket, in an archive, in the agent's pod, or from objects.
"""

import argparse
import contextlib
import datetime as dt
import os
import re
import select
import shutil
import signal
import sys
import tarfile
import termios
import tty
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent import status as view
from agent.allocate.match import pair_groups
from agent.cli.connections import DEFAULT_SOCKET, add_cluster, add_socket, ask, call, connection_of
from agent.cli.main import TABLE, Exit, NotThere, Subparsers, Unreachable, add_output, fail, typed
from agent.cli.output import (
    UNFOLDED,
    Paint,
    answer,
    painter,
    table,
    terminal_width,
    working,
    wrapped,
)
from agent.cluster import REGISTER, NodeView, PodTable, PodView, Role
from agent.errors import ApiError, MalformedText, Refusal, cap
from agent.hami.annotations import RegisteredGpu, decode_either
from agent.kit.logs import configure
from agent.kit.timing import SystemClock
from agent.kit.units import Column, age, by_number, gib
from agent.kube.client import KubeSession
from agent.kube.objects import decode_pod
from agent.kube.reader import NodeReader, nodes_with_gpus
from agent.ledger import (
    ContainerEdits,
    ContainerKey,
    Holder,
    JournalEntry,
    KubeletEpoch,
    Ledger,
    Row,
)
from agent.model import Cause, Condition, Gpu, Health, Inventory, SharedGpu, SharingSettings
from agent.node import Check
from agent.setting import duration, number
from agent.status import NodeStatus, StatusDocument, StatusFacts, open_envelope

# Renders the status of a node as text. Pure.

COLOURS: Final = {"bad": "red", "watch": "yellow"}
"""The colour of a notice's grade."""
BRIEF: Final = 9
"""The first columns of a GPU, which are shown without `-o wide`."""

_NODE_COLUMNS: Final = (
    Column("NODE", least=6),
    Column("GPUS", right=True),
    Column("UNHEALTHY", right=True),
    Column("CORDONED", rank=1, right=True),
    Column("SLICES", right=True),
    Column("ALLOCATED", right=True),
    Column("FREE", right=True),
)


class StatusStyle(msgspec.Struct, frozen=True):
    """How to write. `wide`: tables have all columns, however wide they are."""

    width: int = 80
    wide: bool = False
    paint: Paint = lambda text, _: text

    def graded(self, line: str, grade: str) -> str:
        """The line in the colour of that grade."""
        return self.paint(line, COLOURS[grade]) if grade else line

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> Iterator[str]:
        """A table that fits the terminal."""
        return table(columns, rows, UNFOLDED if self.wide else self.width)

    def notices(self, told: Iterable[view.Notice]) -> Iterator[str]:
        """The notices in their colours, folded."""
        for text, grade in told:
            yield from (self.graded(line, grade) for line in wrapped(text, self.width))


def status_lines(
    found: StatusDocument, now: dt.datetime, style: StatusStyle, *, refused: bool = True
) -> Iterator[str]:
    """The node, its GPUs, and what needs attention. `refused`: also the last refusal."""
    for line in view.heads(found.node, now):
        # A part that fits on a line stays whole.
        parts = [part if len(part) > style.width - 4 else part.replace(" ", "\0") for part in line]
        yield from wrapped(" · ".join(parts), style.width)

    grades = ["", *map(view.gpu_grade, found.gpus), ""]  # titles and what is left out have none
    columns = view.GPU_COLUMNS if style.wide else view.GPU_COLUMNS[:BRIEF]
    gpus = style.table(columns, [view.gpu_cells(gpu) for gpu in found.gpus])
    yield from map(style.graded, gpus, grades) if found.gpus else ["no GPU is shared on this node"]

    yield from style.notices(view.notices(found, now, refused=refused))
    yield from wrapped(view.summary(found), style.width)


def pod_lines(found: StatusDocument, now: dt.datetime, style: StatusStyle) -> Iterator[str]:
    """A table with a line for each container and GPU; what uses the most memory comes first."""
    if rows := view.pod_rows(found, now):
        yield from style.table(view.POD_COLUMNS, rows)
        yield from style.notices(view.pod_notices(found))
    else:
        yield "no container holds a slice"


def entry_lines(
    title: str, entries: Sequence[JournalEntry] | None, now: dt.datetime, style: StatusStyle
) -> Iterator[str]:
    """Changes or refusals, the newest first; equal ones are one with their number."""
    unknown = "not known, because no agent was read"
    yield f"{title}:" if entries else f"{title}: {unknown if entries is None else 'none'}"

    for text, _ in view.entry_lines(entries or (), now):
        yield from wrapped(text, style.width)


# Where the status is read from; each answer names its source and its time.

PROGRAM: Final = "hami-agent-status"
"""The name under which the API server sees the requests."""
RESOURCE: Final = SharingSettings().resource
DEADLINE: Final = 5.0
"""Seconds for the agent's answer by its socket."""
MEMBER: Final = "hami-agent/status.json"
"""The first file of a bundle. Source: agent/cli/support.py."""
ARCHIVE: Final = "an archive of `hami-agent bundle`"
LARGEST: Final = 9 * 1024 * 1024
"""Bytes of a bundle that are read, packed and unpacked."""
NOT_WELL: Final = frozenset({"GpuUnhealthy", "GpuReleased", "GpuDriverUnresponsive"})
"""Reasons of Events that say why a GPU is not offered."""


class StatusRead(msgspec.Struct, frozen=True):
    """The status of a node, made by `source` at `at`. `missing`: what the source does not know."""

    found: StatusDocument
    at: dt.datetime
    source: str
    missing: str = ""


def status_at(socket: Path) -> StatusRead:
    """The status by the agent's socket. Raises Unreachable: no agent answers there."""
    try:
        status, text = call(socket, "GET", "/api/v1/status", DEADLINE)
        if status != 200:
            raise Unreachable(f"{socket}: {cap(text)}")
        return StatusRead(*open_envelope(text.encode(), "Status", StatusDocument), str(socket))
    except MalformedText as error:
        raise Unreachable(f"{socket} did not answer as an agent: {error}") from error


def status_in(bundle: Path) -> StatusRead:
    """The status in an archive of `hami-agent bundle`, whose first file is MEMBER.

    `gzip` and `tarfile` believe an archive that asks for GiB for a name. This unpacks a bounded
    part of it, and reads one header. Raises Unreachable: it cannot be read, or is no such archive.
    """
    try:
        if bundle.exists() and not bundle.is_file():  # a pipe may block for ever
            raise Unreachable(f"{bundle} is not a regular file; name {ARCHIVE}")

        with bundle.open("rb") as file:
            packed = file.read(LARGEST)

        content = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(packed, LARGEST)
        member = tarfile.TarInfo.frombuf(content[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
        if member.name != MEMBER or not member.isreg() or member.size < 0:
            raise tarfile.ReadError("the status is not its first file")

        text = content[tarfile.BLOCKSIZE : tarfile.BLOCKSIZE + member.size]
        return StatusRead(*open_envelope(text, "Status", StatusDocument), str(bundle))
    except OSError as error:
        raise Unreachable(f"{bundle} cannot be read: {error.strerror or error}") from error
    except (tarfile.TarError, zlib.error) as error:
        raise Unreachable(f"{bundle} is not {ARCHIVE}") from error
    except MalformedText as error:
        raise Unreachable(f"{bundle}: {error}") from error


# The status of a node as its objects at the API server show it, where no agent answers.

UNTOLD: Final = (
    "the Node's register annotation says that it is unhealthy; no condition GpuDegraded and no "
    "Event of the last hour that was read says why: read the log of its device plugin"
)

_CONDITIONS: Final = {
    "H-RELEASED": (Condition.UNMONITORED, Cause.RELEASED),
    "H-SILENT": (Condition.UNMONITORED, Cause.DRIVER),
    "H-LOST": (Condition.LOST, Cause.LOST),
}
"""What a GPU is that is not served, by the id of the reason; with each other one it is bad."""


def observed_status(
    node: NodeView,
    pods: Iterable[PodView],
    resource: str,
    now: dt.datetime,
    reasons: Sequence[str] = (),
) -> StatusDocument:
    """The node by its annotations, and its pods by theirs. What is used is not known.

    `reasons`: sentences about GPUs that are not well, the last first. Raises MalformedText: the
    register annotation cannot be read.
    """
    text = node.annotations.get(REGISTER)
    registered = decode_either(text) if text else ()
    holding = [pod for pod in pods if pod.groups and not pod.terminal]
    facts = StatusFacts(
        now,
        NodeStatus(node.name, resource=resource, lock=view.lock_status(node.annotations)),
        node=node,
        inventory=Inventory(gpus=tuple(_observed_gpu(gpu, now, reasons) for gpu in registered)),
        ledger=Ledger(tuple(row for pod in holding for row in _observed_rows(pod, now))),
        pods=PodTable({pod.uid: pod for pod in holding}, synced=True),
    )

    # Since when, only an agent can say.
    changed, counts = msgspec.structs.replace, (one.split_count for one in registered)
    pairs = zip(view.gpus_of(facts), counts, strict=True)
    gpus = (changed(gpu, since=None, slices=count) for gpu, count in pairs)
    held = (changed(one, since=None) for one in view.allocations_of(facts))
    return StatusDocument(facts.about, tuple(gpus), tuple(held))


def _observed_gpu(gpu: RegisteredGpu, now: dt.datetime, reasons: Iterable[str]) -> SharedGpu:
    """The GPU as its Node reports it; its own memory and place on the bus are not reported."""
    health = Health(Condition.OK, now)
    if not gpu.healthy:
        # As `Gpu.title` and gpus_in_words() of agent.report name it.
        name = rf"(?:\({re.escape(gpu.uuid)}\)|\bGPUs (?:\d+, )*{gpu.index}\b)[^:]*"
        found = (re.search(rf"{name}: (.*?)(?=; GPU |$)", text) for text in reasons)
        text = next((one[1] for one in found if one), UNTOLD)
        # A GPU that was lost or released and cools down now keeps the id, and is bad.
        is_over = re.search(" is back| before it was released", text)
        runbook = "" if is_over else text.rpartition("[")[2].rstrip("]")
        condition, cause = _CONDITIONS.get(runbook, (Condition.BAD, Cause.NONE))
        health = Health(condition, now, cause, text, serving=False)

    name = gpu.type_name.removeprefix("NVIDIA-")
    physical = Gpu(gpu.uuid, gpu.index, name, None, "", gpu.numa)
    offer = gpu.split_count, gpu.registered_mib, gpu.core_percent, gpu.type_name, gpu.mode
    return SharedGpu(physical, health, *offer)


def _observed_rows(pod: PodView, now: dt.datetime) -> Iterator[Row]:
    """The rows that an agent has of a pod with this devices annotation."""
    groups = pod.groups or ()
    try:
        pairs = pair_groups(groups, pod.containers).items()
        named = [(name, shares) for name, (_, shares) in pairs]
    except Refusal:
        # Groups and containers do not fit together: the shares are held all the same.
        named = [("", group) for group in groups if group]

    roles = {container.name: container.role for container in pod.containers}

    for place, (name, shares) in enumerate(named):
        yield Row(
            ContainerKey(pod.uid, name or str(place)),
            Holder(pod.namespace, pod.name, name),
            shares,
            slice_ids=(),
            edits=ContainerEdits(),
            answered_at=now,
            epoch=KubeletEpoch(),
            role=roles.get(name, Role.APP),
            group=place,
        )


async def _read_node(session: KubeSession, source: str, args: argparse.Namespace) -> StatusRead:
    """Read the agent of the node in its pod; if it does not answer, or by --objects, the objects.

    Raises NotThere: there is no such Node; ApiError: the objects cannot be read either.
    """
    node, resource, missing = args.node, args.resource or RESOURCE, ""
    reader = NodeReader(session, node)

    try:
        if not args.objects:
            text = await reader.by_agent("status", "-o", "json")
            way = f"agent of {node} in its pod, through the {source}"
            return StatusRead(*open_envelope(text, "Status", StatusDocument), way)
    except (ApiError, MalformedText) as error:
        missing = f"only what its objects show, because the agent was not read: {error}"

    at = SystemClock().now()
    if (found_node := await reader.node()) is None:
        raise NotThere(f"the cluster has no Node {node}")

    seen, degraded = found_node
    pods, reasons = await reader.pods(lambda item: decode_pod(item, resource)), [degraded]
    changes: tuple[JournalEntry, ...] | None = None
    with contextlib.suppress(ApiError):  # without this right they are not known
        told = (
            JournalEntry(one.last, one.reason, one.message, one.kind == "Warning")
            for one in await reader.events()
            if one.last is not None
        )
        changes = tuple(sorted(told, key=lambda one: one.at, reverse=True))
        reasons += [one.text for one in changes if one.reason in NOT_WELL]

    try:
        found = observed_status(seen, pods, resource, at, reasons)
    except MalformedText as error:
        raise ApiError(f"the register annotation of {node} cannot be read: {error}") from error

    found = msgspec.structs.replace(found, changes=changes)
    return StatusRead(found, at, f"objects of the {source}" if args.objects else source, missing)


def show_nodes(args: argparse.Namespace, environ: Mapping[str, str], silent: str = "") -> int:
    """Print what all Nodes with GPUs show. `silent`: why no agent was read. Raises Unreachable."""
    connection, at = connection_of(args.kubeconfig, args.context, environ), SystemClock().now()
    source, resource = f"API server by {connection.source}", args.resource or RESOURCE
    every = ask(connection, PROGRAM, lambda session: nodes_with_gpus(session, resource))
    found, rows = [], []

    for seen, pods in sorted(every, key=lambda one: by_number(one[0].name)):
        try:
            one = observed_status(seen, pods, resource, at)
        except MalformedText:
            check = Check("report", ok=False, text="the register annotation cannot be read")
            one = StatusDocument(NodeStatus(seen.name, resource=resource, checks=(check,)), ())

        gpus, memory = one.gpus, sum(gpu.sellable_mib for gpu in one.gpus)
        found.append(one)
        cells = [
            cap(one.node.name),
            "?" if one.node.checks else str(len(gpus)),
            str(sum(gpu.condition != Condition.OK for gpu in gpus)),
            str(sum(gpu.cordoned for gpu in gpus)),
            f"{sum(gpu.slices_held for gpu in gpus)}/{sum(gpu.slices for gpu in gpus)}",
            f"{gib(sum(gpu.promised_mib for gpu in gpus), '')}/{gib(memory)}",
            gib(sum(gpu.free_mib for gpu in gpus)),
        ]
        rows.append(cells)

    style = StatusStyle(terminal_width(environ), args.output == "wide")
    lines = [*style.table(_NODE_COLUMNS, rows), *wrapped(f"source: {source}", style.width)]
    answer(args.output, "Nodes", found, lines, at=at, source=source)
    text = f"{silent} These are the Nodes of the cluster; --node NAME reads one"
    return fail("status", text, Exit.INCOMPLETE) if silent else Exit.OK


OF_CLUSTER: Final = ("objects", "resource", "kubeconfig", "context")
"""Options of the way by the API server: to one Node with --node, else to all that have GPUs."""
DAY: Final = 24 * 3600
"""Seconds for which an agent knows what happened."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verbs `status` and `top`."""
    parser = subparsers.add_parser(
        "status",
        description="Shows the node as the running agent sees it: readiness, GPUs, their health, "
        "what to do, and the last refusal. With --node it reads a node of the cluster, also one "
        "whose agent does not answer. Without an agent on this machine it lists the Nodes with "
        "GPUs of the kubeconfig's cluster. Exits 3 if the source does not answer, 4 if there is no "
        "such node, and 5 if only the objects could be read.",
        epilog="example: hami-agent status --since 24h",
    )

    parser.add_argument("--by", choices=("gpu", "pod"), default="gpu", help="what a line is")
    parser.add_argument(
        "--since",
        type=typed(duration(0, DAY), "a duration no longer than 24h, such as 30m"),
        metavar="DURATION",
        help="also show refusals and changes of that time, at most 24h",
    )

    source = parser.add_mutually_exclusive_group()
    add_socket(source)
    told = "read an archive of `hami-agent bundle` instead"
    source.add_argument("--from", dest="bundle", type=Path, metavar="FILE", help=told)
    told = "a node of the cluster: its agent in its pod (pods/exec), else its objects"
    source.add_argument("--node", metavar="NAME", help=told)
    told = "with --node: what HAMi's scheduler reads, the objects, also where an agent answers"
    parser.add_argument("--objects", action="store_true", help=told)
    told = f"the resource name of slices in the cluster (default {RESOURCE})"
    parser.add_argument("--resource", metavar="NAME", help=told)
    add_cluster(parser)
    add_output(parser, forms=(TABLE, "wide", "json", "yaml"))

    top = subparsers.add_parser(
        "top", description=show_live.__doc__, epilog="example: hami-agent top --interval 5"
    )
    top.add_argument(
        "--interval",
        type=typed(number(1, 3600), "a number from 1 to 3600"),
        default=2.0,
        metavar="SECONDS",
        help="seconds between two looks, 1 to 3600 (default 2)",
    )
    add_socket(top)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the verb that is in `args.verb`; return the exit code."""
    configure("error", "auto", environ)
    if args.verb == "top":
        return show_live(args, environ)

    asked = [f"--{name}" for name in OF_CLUSTER if vars(args)[name]]
    is_local = bool(args.bundle or args.socket != DEFAULT_SOCKET)
    is_of_one = is_local or args.since is not None or args.by == "pod"
    # An option that would be ignored is refused: its user expects the cluster to be read.
    if asked and args.node is None:
        text = f"{', '.join(asked)}: this lists the Nodes of a cluster; give --node NAME for one"
        return fail("status", text, Exit.USAGE) if is_of_one else show_nodes(args, environ)

    try:
        if args.bundle is not None:
            read = status_in(args.bundle)
        elif args.node is not None:
            connection = connection_of(args.kubeconfig, args.context, environ)
            source = f"API server by {connection.source}"
            with working(f"reading {cap(args.node, 64)}"):
                read = ask(connection, PROGRAM, lambda api: _read_node(api, source, args))
        else:
            read = status_at(args.socket)

    except Unreachable as error:
        # Nobody named the socket, so this may be a workstation: its kubeconfig knows the Nodes.
        if not (is_local or args.node):
            with contextlib.suppress(Unreachable):
                return show_nodes(args, environ, str(error))

        raise

    style = StatusStyle(terminal_width(environ), args.output == "wide", painter(environ))
    lines = _lines(read, args, style)
    answer(args.output, "Status", read.found, lines, at=read.at, source=read.source)
    return fail("status", read.missing, Exit.INCOMPLETE) if read.missing else Exit.OK


def _lines(read: StatusRead, args: argparse.Namespace, style: StatusStyle) -> Iterator[str]:
    """What the chosen table shows, what happened if that was asked for, and the source."""
    found, at = read.found, read.at
    if args.by == "pod":
        yield from pod_lines(found, at, style)
    else:
        yield from status_lines(found, at, style, refused=args.since is None)

    if args.since is not None:
        oldest = at - dt.timedelta(seconds=args.since)

        for title, entries in (("refusals", found.refusals), ("changes", found.changes)):
            yield ""
            recent = [entry for entry in entries or () if entry.at >= oldest]
            yield from entry_lines(title, None if entries is None else recent, at, style)

        if found.journal_since is not None and at >= found.journal_since > oldest:
            since = found.journal_since.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            text = f"(known since {since}; the agent's log has earlier ones)"
            yield from wrapped(text, style.width)

    yield from wrapped(f"source: {read.source}, {age(at, SystemClock().now())} old", style.width)


# The live screen.

OPENED: Final = "\x1b[?1049h\x1b[?25l"
CLOSED: Final = "\x1b[?25h\x1b[?1049l"
"""The terminal's second screen without a cursor, and back to what was on it before."""


def show_live(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Shows `status` of this node and its containers live, as large as the terminal.

    q or Ctrl-C ends it. Exits 3 if no agent answers.
    """
    if not sys.stdout.isatty():
        return fail("top", "there is no terminal: use `hami-agent status`", Exit.USAGE)

    read, trouble, paint = status_at(args.socket), "", painter(environ)
    sys.stdout.write(OPENED)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        stack.callback(sys.stdout.flush)
        stack.callback(sys.stdout.write, CLOSED)
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        stack.callback(signal.signal, signal.SIGTERM, before)
        keys = [0] if sys.stdin.isatty() else []
        for terminal in keys:  # each key is read at once, and not shown
            stack.callback(termios.tcsetattr, 0, termios.TCSANOW, termios.tcgetattr(terminal))
            tty.setcbreak(terminal)

        while True:
            columns, height = shutil.get_terminal_size()
            style = StatusStyle(columns, paint=paint)
            told = f"the values are of {read.at:%H:%M:%S} UTC: {trouble}"
            lines = list(style.notices([(told, "bad")] if trouble else []))
            lines += [*status_lines(read.found, read.at, style), ""]
            lines += pod_lines(read.found, read.at, style)

            if len(lines) > height:
                more = f"{len(lines) - height + 1} more lines: `hami-agent status --by pod`"
                lines[height - 1 :] = wrapped(more, columns)[:1]
            # A line is cleared before it is written: behind a full one the cursor is still on it.
            sys.stdout.write("\x1b[H" + "\n".join(f"\x1b[2K{line}" for line in lines) + "\x1b[J")
            sys.stdout.flush()
            typed, _, _ = select.select(keys, [], [], args.interval)
            if typed and re.search(rb"[qQ]|\A\Z", os.read(0, 64)):  # nothing: the terminal is gone
                break

            try:
                read, trouble = status_at(args.socket), ""
            except Unreachable as error:
                trouble = str(error)

    return Exit.OK
