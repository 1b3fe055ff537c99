"""`hami-agent status`: the node, its GPUs, who holds them, and what happened."""

import argparse
import contextlib
import datetime as dt
import difflib
import operator
import stat
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent.cli.connections import DEFAULT_SOCKET, add_cluster, add_socket, ask, call, connection_of
from agent.cli.main import (
    INCOMPLETE,
    OK,
    TABLE,
    USAGE,
    NotThere,
    Subparsers,
    Unreachable,
    add_output,
    fail,
    nearest,
    typed,
)
from agent.cli.output import (
    UNFOLDED,
    Column,
    Paint,
    answer,
    painter,
    table,
    terminal_width,
    working,
    wrapped,
    writes_utf8,
)
from agent.errors import ApiError, MalformedText, cap
from agent.kit.logs import configure
from agent.kit.timing import SystemClock
from agent.kit.units import age, by_number, gib, percent
from agent.kube.api import EndlessList
from agent.kube.client import KubeSession
from agent.kube.reader import NodeReader, nodes_with_gpus
from agent.ledger import JournalEntry
from agent.model import Condition, SharingSettings
from agent.node.findings import Check
from agent.setting import duration
from agent.status import (
    AllocationStatus,
    GpuStatus,
    NodeStatus,
    ShareStatus,
    StatusDocument,
    names_of,
    observed_status,
    open_envelope,
)

# Renders the status of a node as text. Pure.

OF_GPUS: Final = frozenset({"gpu_health", "cdi"})
"""The checks that repeat what the lines about the GPUs say."""

SEVERE: Final = frozenset({Condition.BAD, Condition.LOST})
"""The conditions in red and in capitals."""

BLOCKS: Final = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS: Final = " .:-=+*%#"
"""The steps of a history, from none to all."""

HEAD_WIDTH: Final = 80
"""The head is pasted into chats and tickets, so that it is no wider, whatever the terminal is."""

_GPU_COLUMNS: Final = (
    Column("GPU"),
    Column("MODEL", rank=4, flexible=True),
    Column("HEALTH"),
    Column("SLICES", right=True),
    Column("PROMISED", right=True),
    Column("CORES", rank=1, right=True),
    Column("USED", rank=3, right=True),
    Column("UTIL", rank=3, right=True),
    Column("15 MIN", rank=5),
)

_WIDE: Final = (Column("PHYSICAL", right=True), Column("PCI"), Column("NUMA"), Column("UUID"))

POD_COLUMNS: Final = (
    Column("NAMESPACE", flexible=True),
    Column("POD", flexible=True),
    Column("CONTAINER", rank=1, flexible=True),
    Column("GPU"),
    Column("MEMORY", right=True),
    Column("USED", rank=2, right=True),
    Column("CORES", rank=3, right=True),
    Column("UTIL", rank=3, right=True),
    Column("IDLE", rank=4, right=True),
    Column("SINCE", rank=5, right=True),
    Column("KUBELET", rank=6),
)

_NODE_COLUMNS: Final = (
    Column("NODE", flexible=True),
    Column("GPUS", right=True),
    Column("UNHEALTHY", right=True),
    Column("CORDONED", rank=1, right=True),
    Column("SLICES", right=True),
    Column("PROMISED", right=True),
)

IDLE: Final = dt.timedelta(hours=1)
"""From then on a container without a kernel is pointed out."""


class StatusStyle(msgspec.Struct, frozen=True):
    """How to write."""

    width: int = 80
    """Columns of the terminal."""

    ascii: bool = False

    wide: bool = False
    """Tables have all columns, however wide they are."""

    paint: Paint = lambda text, _: text


def status_lines(found: StatusDocument, now: dt.datetime, style: StatusStyle) -> Iterator[str]:
    """The node, its GPUs, and what needs attention."""
    yield from head_lines(found.node, now, style)
    yield from gpu_lines(found.gpus, style)
    yield from attention_lines(found, now, style)
    held, slices = sum(g.slices_held for g in found.gpus), sum(g.slices for g in found.gpus)
    text = f"{held} of {slices} slices in use"

    if unserved := sum(not gpu.serving for gpu in found.gpus):
        text += f", {unserved} of {len(found.gpus)} GPUs not offered"

    late = sum(one.confirmed is False and not one.ended for one in found.allocations or ())
    text += f", {late} not recorded by the kubelet yet" if late else ""
    yield from wrapped(text, style.width)


def head_lines(node: NodeStatus, now: dt.datetime, style: StatusStyle) -> Iterator[str]:
    """The node and its agent, the settings in force, and the lock if it is held."""
    ready = {True: "READY", False: "NOT READY", None: "by its objects"}[node.ready]
    up = f" up {age(node.started_at, now)}" if node.started_at else ""
    factors = (("memory", node.memory_scaling), ("cores", node.core_scaling))
    rows = [
        [
            f"{cap(node.name)}  {ready}",
            node.version and f"agent {cap(node.version)}{up}",
            node.driver and f"driver {cap(node.driver)}",
            node.kubelet and f"kubelet: {cap(node.kubelet)}",
            "observes only" if node.observe else "",
        ]
    ]

    if node.split_count is not None:
        rows.append(
            [
                f"settings  {node.split_count} slices for each GPU",
                *(f"{name} x{factor:g}" for name, factor in factors if factor is not None),
                f"scheduler {cap(node.scheduler)}",
                cap(node.resource),
                "profiles " + cap(", ".join(node.profiles)) if node.profiles else "",
            ]
        )

    if node.lock is not None:
        held = f" for {age(node.lock.since, now)}" if node.lock.since else ""
        rows.append([f"lock  held by {cap(node.lock.holder) or 'nobody named'}{held}"])

    width, between = min(style.width, HEAD_WIDTH), " | " if style.ascii else " · "

    for line, *parts in rows:
        for part in filter(None, parts):
            longer = f"{line}{between}{part}"
            if len(longer) > width:
                yield from wrapped(line, width)
                longer = f"  {part}"

            line = longer  # noqa: PLW2901 -- it grows until it is full

        yield from wrapped(line, width)


def gpu_lines(gpus: Sequence[GpuStatus], style: StatusStyle) -> Iterator[str]:
    """A table with a line for each GPU."""
    if not gpus:
        yield "no GPU is shared on this node"
        return

    rows = []

    for gpu in gpus:
        condition = cap(gpu.condition, 16)
        if condition in SEVERE:
            condition = condition.upper()

        row = [
            "-" if gpu.index is None else str(gpu.index),
            cap(gpu.model.removeprefix("NVIDIA "), 64) or "-",
            f"{condition},cordoned" if gpu.cordoned else condition or "-",
            f"{gpu.slices_held}/{gpu.slices}",
            promised(gpu.promised_mib, gpu.sellable_mib),
            f"{gpu.promised_cores}/{percent(gpu.sellable_cores)}",
            gib(gpu.used_mib),
            percent(gpu.gpu_percent),
            spark(gpu.history.gpu_percent if gpu.history else (), plain=style.ascii),
            gib(gpu.memory_mib),
            cap(gpu.pci, 32) or "-",
            "-" if gpu.numa is None else str(gpu.numa),
            cap(gpu.uuid, 64),
        ]
        rows.append(row)

    def painted(number: int, line: str) -> str:
        condition = gpus[number].condition if number >= 0 else Condition.OK
        if condition == Condition.OK:
            return line
        return style.paint(line, "red" if condition in SEVERE else "yellow")

    columns = (*_GPU_COLUMNS, *_WIDE) if style.wide else _GPU_COLUMNS
    yield from table(columns, rows, UNFOLDED if style.wide else style.width, painted)


def attention_lines(found: StatusDocument, now: dt.datetime, style: StatusStyle) -> Iterator[str]:
    """What needs a person: GPUs that are not well, checks that fail, pods that were refused."""
    for text, colour in (*_gpu_notices(found, now), *_notices(found, now)):
        for line in wrapped(text, style.width):
            yield style.paint(line, colour) if colour else line


def _notices(found: StatusDocument, now: dt.datetime) -> Iterator[tuple[str, str]]:
    idle = [
        (one.last_kernel, one)
        for one in found.allocations or ()
        if one.last_kernel is not None and now - one.last_kernel >= IDLE
    ]
    if idle:
        since_when, longest = min(idle, key=operator.itemgetter(0))
        some = "1 container has" if len(idle) == 1 else f"{len(idle)} containers have"
        which = "it is" if len(idle) == 1 else "the longest is"
        text = f"idle: {some} run no kernel for over an hour; {which} {_container(longest)}"
        yield f"{text}, {age(since_when, now)}; `hami-agent status --by pod` lists all", ""

    for check in found.node.checks:
        if not check.ok and check.name not in OF_GPUS:
            word, colour = ("not ready", "red") if check.required else ("degraded", "yellow")
            yield f"{word}: {check.name}: {cap(check.text)}", colour

    # Nothing can be done for a pod that is gone: --since tells of it. An older agent tells of all.
    if refusals := found.refusals if found.standing is None else found.standing:
        last = refusals[0]
        text = f"refused: {len(refusals)} in 24 h, the last {age(last.at, now)} ago"
        yield f"{text}: {cap(last.text, 1024)} [{cap(last.reason)}]", "yellow"


def _gpu_notices(found: StatusDocument, now: dt.datetime) -> Iterator[tuple[str, str]]:
    """What is not well about GPUs. Equal words about several GPUs are one sentence."""
    told: dict[tuple[str, str], list[str]] = {}

    for gpu in found.gpus:
        which = cap(gpu.uuid) if gpu.index is None else str(gpu.index)
        notices = [(f"is not offered: {cap(text, 1024)}", "yellow") for text in gpu.obstacles]

        if gpu.condition and gpu.condition != Condition.OK:
            since = f" for {age(gpu.since, now)}" if gpu.since else ""
            act = f"; action: {cap(gpu.action)}" if gpu.action not in {"", "none"} else ""
            text = f"{cap(gpu.condition)}{since}: {cap(gpu.text or gpu.cause, 1024)}{act}"
            notices.insert(0, (text, "red" if gpu.condition in SEVERE else "yellow"))

        if gpu.cordoned:
            act = f"`hami-agent uncordon {which} --node {cap(found.node.name)}` ends it"
            notices.append((f"is cordoned: the scheduler places no new pod; {act}", ""))

        for notice in notices:
            told.setdefault(notice, []).append(which)

    for (text, colour), gpus in told.items():
        be, _, rest = text.partition(" ")
        be = "are" if be == "is" and len(gpus) > 1 else be
        yield f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(gpus)} {be} {rest}", colour


def pod_lines(
    allocations: Sequence[AllocationStatus], now: dt.datetime, style: StatusStyle
) -> Iterator[str]:
    """A table with a line for each container and GPU; what uses the most memory comes first."""
    pairs = [(one, share) for one in allocations for share in one.shares]
    pairs.sort(key=lambda pair: -(pair[1].used_mib or 0))
    rows = [pod_row(one, share, now) for one, share in pairs]

    if not rows:
        yield "no container holds a slice"
        return

    yield from table(POD_COLUMNS, rows, UNFOLDED if style.wide else style.width)

    for one in allocations:
        if one.unkept:
            text = f"nothing keeps the limits of {_container(one)}: {cap(one.unkept)}"
            yield from wrapped(text, style.width)

        if one.unread:
            text = f"the use of {_container(one)} is not known: {cap(one.unread)}"
            yield from wrapped(text, style.width)


def pod_row(one: AllocationStatus, share: ShareStatus, now: dt.datetime) -> list[str]:
    """The cells of one container and GPU."""
    said = {True: "recorded", False: "not recorded yet", None: "-"}[one.confirmed]
    said = "other GPUs" if one.mismatched else said

    return [
        cap(one.namespace, 64) or "-",
        cap(one.pod, 64) or "-",
        cap(one.container, 64) or "-",
        cap(share.gpu, 64),
        "all" if share.memory_mib == 0 else gib(share.memory_mib),
        gib(share.used_mib),
        "any" if share.cores == 0 else percent(share.cores),
        percent(share.gpu_percent),
        age(one.last_kernel, now),
        age(one.since, now),
        "ended" if one.ended else said,
    ]


def _container(one: AllocationStatus) -> str:
    return "/".join(cap(name, 64) for name in (one.namespace, one.pod, one.container))


def entry_lines(
    title: str, entries: Sequence[JournalEntry], now: dt.datetime, style: StatusStyle
) -> Iterator[str]:
    """Changes or refusals, the newest first, each with its age, its object and its reason."""
    yield f"{title}:" if entries else f"{title}: none"

    for entry in entries:
        of = f" {cap(entry.namespace)}/{cap(entry.pod)}" if entry.pod else ""
        text = f"{age(entry.at, now)} ago  {cap(entry.reason)}{of}: {cap(entry.text, 1024)}"
        yield from wrapped(text, style.width)


def promised(mib: int, sellable_mib: int) -> str:
    """What is promised of what can be, such as `48.0/143.4 GiB`."""
    # 0: it was lost before this start, so its size is not known.
    return f"{gib(mib, '')}/{gib(sellable_mib or None)}"


def spark(values: Sequence[int | None], *, plain: bool) -> str:
    """Percents as blocks; a space where there is none. Two values share a block."""
    blocks, line = ASCII_BLOCKS if plain else BLOCKS, ""

    for place in range(0, len(values), 2):
        known = [value for value in values[place : place + 2] if value is not None]
        share = min(100, max(0, *known)) / 100 if known else 0
        line += blocks[max(1, round(share * (len(blocks) - 1)))] if known else " "

    return line


# Where the status is read from; each answer names its source and its time.

PROGRAM: Final = "hami-agent-status"
"""The name under which the API server sees the requests."""

RESOURCE: Final = SharingSettings().resource
DEADLINE: Final = 5.0
"""Seconds for the agent's answer by its socket."""

MEMBER: Final = "hami-agent/status.json"
"""The first file of a bundle. Source: agent/cli/bundle.py."""

LARGEST: Final = 8 * 1024 * 1024
"""Most bytes of the status in a bundle."""

LARGEST_ARCHIVE: Final = LARGEST + (1 << 20)
"""Bytes of a bundle that are read, packed and unpacked."""

FILE: Final = (tarfile.REGTYPE, tarfile.AREGTYPE)
"""The two types of a plain file in an archive."""


class StatusRead(msgspec.Struct, frozen=True):
    """The status of a node."""

    found: StatusDocument

    at: dt.datetime
    """When the source made it."""

    source: str
    """Where it was read, for people."""

    missing: str = ""
    """What the source does not know; empty: nothing."""


def status_at(socket: Path) -> StatusRead:
    """The status by the agent's socket.

    Raises:
        Unreachable: nobody answers there, or not as an agent.
    """
    try:
        status, text = call(socket, "GET", "/api/v1/status", DEADLINE)
        if status != 200:
            raise Unreachable(f"{socket}: {cap(text)}")
        found, at = open_envelope(text.encode(), "Status", StatusDocument)
    except MalformedText as error:
        raise Unreachable(f"{socket} did not answer as an agent: {error}") from error

    return StatusRead(found, at, str(socket))


def status_in(bundle: Path) -> StatusRead:
    """The status in an archive of `hami-agent bundle`.

    Raises:
        Unreachable: the file cannot be read, or is no such archive.
    """
    try:
        if not stat.S_ISREG(bundle.stat().st_mode):  # a pipe may block for ever
            text = "is not a regular file; name an archive of `hami-agent bundle`"
            raise Unreachable(f"{bundle} {text}")
        found, at = open_envelope(_member_of(bundle), "Status", StatusDocument)
    except OSError as error:
        raise Unreachable(f"{bundle} cannot be read: {error.strerror or error}") from error
    except (tarfile.TarError, zlib.error) as error:
        raise Unreachable(f"{bundle} is not an archive of `hami-agent bundle`") from error
    except MalformedText as error:
        raise Unreachable(f"{bundle}: {error}") from error

    return StatusRead(found, at, str(bundle))


def _member_of(bundle: Path) -> bytes:
    """The bytes of MEMBER, the first file.

    `gzip` and `tarfile` believe an archive that asks for GiB for a name. This unpacks a bounded
    part of it, and reads one header.

    Raises:
        Unreachable: the first file is not a plain one, or too large.
        OSError: the archive cannot be read.
        TarError, zlib.error: it is no archive of that form.
    """
    with bundle.open("rb") as file:
        packed = file.read(LARGEST_ARCHIVE)

    text = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(packed, LARGEST_ARCHIVE)

    member = tarfile.TarInfo.frombuf(text[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    if member.name != MEMBER:
        raise tarfile.ReadError(
            "the status is not its first file, as `hami-agent bundle` writes it"
        )

    if member.type not in FILE or not 0 <= member.size <= LARGEST:
        raise Unreachable(f"{bundle}: {MEMBER} is not a file of at most 8 MiB")

    return text[tarfile.BLOCKSIZE : tarfile.BLOCKSIZE + member.size]


async def _read_node(session: KubeSession, source: str, args: argparse.Namespace) -> StatusRead:
    """Read the agent of the node in its pod; where it does not answer, the objects.

    With --objects the objects at once, which are what HAMi's scheduler reads.

    Raises:
        NotThere: there is no such Node. The text has the nearest names.
        ApiError: the objects cannot be read either.
    """
    node, resource, missing = args.node, args.resource or RESOURCE, ""
    reader = NodeReader(session, node)

    try:
        if not args.objects:
            found, at = open_envelope(await reader.status(), "Status", StatusDocument)
            return StatusRead(found, at, f"agent of {node} in its pod, through the {source}")
    except EndlessList:
        raise  # its objects would not end either
    except (ApiError, MalformedText) as error:
        missing = f"only what its objects show, because the agent was not read: {error}"

    at = SystemClock().now()
    seen = await reader.node()
    if seen is None:
        known = await reader.names()
        near = difflib.get_close_matches(node, known, n=3, cutoff=0.5) or known[:3]
        there = f"; the nearest names are {', '.join(near)}" if near else ""
        raise NotThere(f"the cluster has no Node {node}{there}")

    pods = await reader.pods(resource)
    try:
        found = observed_status(seen, pods, resource, at)
    except MalformedText as error:
        raise ApiError(f"the register annotation of {node} cannot be read: {error}") from error

    with contextlib.suppress(ApiError):  # without that right the changes are not known
        changes = [
            JournalEntry(
                at=one.last, reason=one.reason, text=one.message, warning=one.kind == "Warning"
            )
            for one in await reader.events()
            if one.last is not None
        ]
        changes.sort(key=lambda one: one.at, reverse=True)
        found = msgspec.structs.replace(found, changes=tuple(changes))

    return StatusRead(found, at, f"objects of the {source}" if args.objects else source, missing)


def show_nodes(args: argparse.Namespace, environ: Mapping[str, str], silent: str) -> int:
    """Print what the objects of all Nodes with GPUs show, where no agent answers (`silent`).

    Raises Unreachable.
    """
    connection, at = connection_of(args.kubeconfig, args.context, environ), SystemClock().now()
    source = f"API server by {connection.source}"
    every = ask(connection, PROGRAM, lambda session: nodes_with_gpus(session, RESOURCE))
    found = []

    for seen, pods in sorted(every, key=lambda one: by_number(one[0].name)):
        try:
            found.append(observed_status(seen, pods, RESOURCE, at))
        except MalformedText:
            check = Check("report", ok=False, text="the register annotation cannot be read")
            node = NodeStatus(name=seen.name, resource=RESOURCE, checks=(check,))
            found.append(StatusDocument(node=node, gpus=()))

    rows = [
        [
            cap(one.node.name),
            "?" if one.node.checks else str(len(one.gpus)),
            str(sum(gpu.condition != Condition.OK for gpu in one.gpus)),
            str(sum(gpu.cordoned for gpu in one.gpus)),
            f"{sum(gpu.slices_held for gpu in one.gpus)}/{sum(g.slices for g in one.gpus)}",
            promised(
                sum(gpu.promised_mib for gpu in one.gpus), sum(gpu.sellable_mib for gpu in one.gpus)
            ),
        ]
        for one in found
    ]
    width = terminal_width(environ)
    lines = [*table(_NODE_COLUMNS, rows, width), *wrapped(f"source: {source}", width)]

    if args.output == "name":
        lines = [f"node/{one.node.name}" for one in found]

    answer(args.output, "Nodes", found, lines, at=at, source=source)
    text = f"{silent} These are the Nodes of the cluster; --node NAME reads one"
    return fail("status", text, INCOMPLETE)


OF_NODE: Final = ("objects", "resource", "kubeconfig", "context")
"""Options that only --node uses."""

DAY: Final = 24 * 3600
"""Seconds for which an agent knows what happened."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `status`."""
    parser = subparsers.add_parser(
        "status",
        description="Shows the node as the running agent sees it: readiness, the health of each "
        "GPU and what to do, what was promised to pods and what is used, and the last refusal. "
        "With --since it also shows what was refused and what changed. With --node it reads a node "
        "of the cluster by a kubeconfig, also one whose agent does not answer. Without an agent on "
        "this machine it lists the Nodes with GPUs of the kubeconfig's cluster. Exits 3 if the "
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
        type=typed(duration(0, DAY), "a duration no longer than 24h, such as 30m"),
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
        help="a node of the cluster: its agent in its pod (pods/exec), else its objects",
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
    # An option that would be ignored is refused: its user expects the cluster to be read.
    if args.node is None and (unused := [f"--{name}" for name in OF_NODE if vars(args)[name]]):
        text = f"{', '.join(unused)}: without --node no API server is read; give --node NAME"
        return fail("status", text, USAGE)

    configure("error", "auto", environ)
    try:
        if args.bundle is not None:
            read = status_in(args.bundle)
        elif args.node is not None:
            connection = connection_of(args.kubeconfig, args.context, environ)
            with working(f"reading {cap(args.node, 64)}"):
                source = f"API server by {connection.source}"
                read = ask(connection, PROGRAM, lambda api: _read_node(api, source, args))
        else:
            read = status_at(args.socket)

        found = read.found if args.gpu is None else only(read.found, args.gpu)
    except Unreachable as error:
        # Nobody named the socket, so this may be a workstation: its kubeconfig knows the Nodes.
        named = args.bundle or args.node or args.gpu or args.socket != DEFAULT_SOCKET
        if not named:
            with contextlib.suppress(Unreachable):
                return show_nodes(args, environ, str(error))

        raise

    style = StatusStyle(
        terminal_width(environ),
        args.ascii or not writes_utf8(),
        args.output == "wide",
        painter(environ),
    )
    lines = _lines(found, args, read, style)

    if args.output == "name":
        held = (one for one in found.allocations or () if one.pod)
        pods = dict.fromkeys(f"pod/{one.namespace}/{one.pod}" for one in held)
        lines = iter(pods if args.by == "pod" else [f"gpu/{gpu.uuid}" for gpu in found.gpus])

    answer(args.output, "Status", found, lines, at=read.at, source=read.source)
    return fail("status", read.missing, INCOMPLETE) if read.missing else OK


def only(found: StatusDocument, name: str) -> StatusDocument:
    """The status of one GPU and of the pods that hold it.

    Raises:
        NotThere: no GPU has that index or UUID. The text has the known ones.
    """
    gpu = next((gpu for gpu in found.gpus if name in names_of(gpu)), None)
    if gpu is None:
        known = [str(gpu.uuid if gpu.index is None else gpu.index) for gpu in found.gpus]
        uuids = [gpu.uuid for gpu in found.gpus]
        there = ", ".join(known) or "none"
        raise NotThere(f"no GPU is named {cap(name, 64)}{nearest(name, uuids)}; GPUs: {there}")

    holds = [
        one
        for one in found.allocations or ()
        if any(share.uuid == gpu.uuid for share in one.shares)
    ]

    return msgspec.structs.replace(found, gpus=(gpu,), allocations=tuple(holds))


def _lines(
    found: StatusDocument, args: argparse.Namespace, read: StatusRead, style: StatusStyle
) -> Iterator[str]:
    """What the chosen table shows, what happened if that was asked for, and the source."""
    at = read.at

    if args.by == "pod":
        yield from pod_lines(found.allocations or (), at, style)
    else:
        yield from status_lines(found, at, style)
        if args.gpu is not None:
            yield ""
            yield from pod_lines(found.allocations or (), at, style)

    if args.since is not None:
        oldest = at - dt.timedelta(seconds=args.since)

        for title, entries in (("refusals", found.refusals), ("changes", found.changes)):
            yield ""
            if entries is None:
                yield f"{title}: not known, because no agent was read"
                continue

            recent = [entry for entry in entries if entry.at >= oldest]
            yield from entry_lines(title, recent, at, style)

        if found.journal_since is not None and at >= found.journal_since > oldest:
            since = found.journal_since.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            text = f"(known since {since}; the agent's log has earlier ones)"
            yield from wrapped(text, style.width)

    yield from wrapped(f"source: {read.source}, {age(at, SystemClock().now())} old", style.width)
