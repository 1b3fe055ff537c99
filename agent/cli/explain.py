"""`hami-agent explain`: why a pod is where it is, gate by gate, and what would place it."""

import argparse
import asyncio
import contextlib
import datetime as dt
import random
import sys
import textwrap
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from agent.cli.connections import NO_KUBECONFIG, add_cluster, connection_of
from agent.cli.logs import configure
from agent.cli.main import (
    INCOMPLETE,
    NOT_FOUND,
    OK,
    PROBLEM,
    TABLE,
    UNREACHABLE,
    USAGE,
    Subparsers,
    add_output,
    fail,
)
from agent.cli.output import UNFOLDED, document, terminal_width, working
from agent.cluster import ALLOCATED
from agent.errors import ApiError, ApiNotFound, MalformedText, SettingsError, cap
from agent.hami.pod import encode_stamp
from agent.host.process import SystemClock
from agent.kube.client import Connection, KubeSession, check, default_namespace
from agent.kube.reader import (
    ClusterReader,
    ClusterSnapshot,
    HeldUse,
    NodeReader,
    NoSuchPod,
    RefusedPod,
)
from agent.ports import Clock
from agent.sandbox.explain.decide import explain_pod
from agent.sandbox.explain.gates import agent_sentence, refusal_id
from agent.sandbox.explain.story import (
    Explanation,
    Gate,
    GateVerdict,
    GpuVerdict,
    NodeVerdict,
    PlacingChange,
    ago,
    counted,
    span,
)
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.status import StatusDocument, open_envelope

# Reads what `explain` needs from the API server, by a kubeconfig alone.

PROGRAM: Final = "hami-agent-explain"
USE_DEADLINE: Final = 3.0
"""Seconds for the agent to say what the pod uses."""


async def read_cluster(
    connection: Connection, namespace: str, name: str, clock: Clock
) -> ClusterSnapshot | NoSuchPod:
    """Read the pod and the parts of the cluster that decide about it; nothing is written.

    If there is no such pod, return the names that may have been meant.

    Raises:
        SettingsError: the files of the connection cannot be used.
        ApiError: the pod cannot be read.
    """
    async with _session(connection) as session:
        reader = ClusterReader(session, clock)
        try:
            found = await reader.snapshot(namespace, name)
        except ApiNotFound:
            return await reader.similar(namespace, name)
        return await _with_use(session, found)


async def read_refused(
    connection: Connection, namespace: str, clock: Clock
) -> tuple[RefusedPod, ...]:
    """Read the pods that kubelets refused; `namespace` empty: of all namespaces.

    Raises:
        SettingsError: the files of the connection cannot be used.
        ApiError: the pods cannot be read.
    """
    async with _session(connection) as session:
        return await ClusterReader(session, clock).refused(namespace)


async def _with_use(session: KubeSession, found: ClusterSnapshot) -> ClusterSnapshot:
    """The snapshot with what a running pod uses, if it has shares and its agent answers in time."""
    metadata, node = found.pod["metadata"], found.pod["spec"].get("nodeName", "")
    is_running = found.pod["status"].get("phase") == "Running"
    if not is_running or ALLOCATED not in (metadata.get("annotations") or {}):
        return found
    try:
        async with asyncio.timeout(USE_DEADLINE):
            answer = await NodeReader(session, node).by_agent()
        status, _ = open_envelope(answer, "Status", StatusDocument)
    except (ApiError, MalformedText) as error:
        return msgspec.structs.replace(found, use_unread=f"the agent was not read: {error}")
    except TimeoutError:
        text = f"the agent of {node} has not answered in {USE_DEADLINE:g} s"
        return msgspec.structs.replace(found, use_unread=text)
    uses = tuple(
        HeldUse(one.container, share.uuid, share.used_mib, one.last_kernel)
        for one in status.allocations or ()
        for share in one.shares
        if (one.namespace, one.pod) == (metadata.get("namespace"), metadata.get("name"))
    )
    return msgspec.structs.replace(found, uses=uses)


@contextlib.asynccontextmanager
async def _session(connection: Connection) -> AsyncIterator[KubeSession]:
    check(connection)
    session = KubeSession(connection, random.SystemRandom(), PROGRAM)
    try:
        yield session
    finally:
        await session.close()


# Renders an explanation as text for people, and as data for programs.

NODES_SHOWN: Final = 5


def rendered(explanation: Explanation, source: str, now: dt.datetime, columns: int) -> str:
    """The explanation for people, folded at `columns`."""
    return folded(_lines(explanation, source, now), columns)


def folded(lines_of: Iterable[tuple[int, int, str]], columns: int) -> str:
    """Lines of indent, indent of what is folded, and text, folded at `columns`."""
    lines: list[str] = []
    for indent, hanging, text in lines_of:
        lines += textwrap.wrap(
            text,
            columns,
            initial_indent=" " * indent,
            subsequent_indent=" " * min(hanging, columns // 3),
            break_on_hyphens=False,
        )
    return "".join(f"{line}\n" for line in lines)


def explanation_data(explanation: Explanation) -> dict[str, object]:
    """The explanation for programs."""
    return {
        "namespace": explanation.namespace,
        "pod": explanation.name,
        "phase": explanation.phase,
        "headline": explanation.headline,
        "blocked": explanation.is_blocked,
        "gates": [_gate(gate) for gate in explanation.gates],
        "nodes": [_plain(node) for node in explanation.nodes],
        "nodesByReason": dict(explanation.reasons),
        "changes": [_plain(change) for change in explanation.changes],
        "missing": list(explanation.missing),
    }


def _lines(
    explanation: Explanation, source: str, now: dt.datetime
) -> Iterator[tuple[int, int, str]]:
    """Indent, indent of what is folded, and text of each line."""
    yield 0, 2, explanation.headline
    for gate in explanation.gates:
        reason = f" [RUNBOOK {gate.reason}]" if gate.reason else ""
        yield 0, 5, f"{gate.verdict.value:<4} {gate.name:<10} {gate.said}{reason}"
        for fact in gate.facts:
            yield 7, 9, fact
        if gate.name == "placement" and gate.verdict is GateVerdict.BLOCKED:
            yield from _node_lines(explanation)
        if gate.advice:
            yield 7, 9, f"do: {gate.advice}"
    if explanation.changes:
        yield 0, 2, "Smallest changes that would place it (tried with the scheduler's model):"
        for number, change in enumerate(explanation.changes, 1):
            yield 2, 6, f"({number}) {change.said} -> {cap(change.node, 128)}"
    for text in explanation.missing:
        yield 0, 2, f"missing: {text}"
    age = span((now - explanation.taken).total_seconds())
    yield 0, 2, f"data: {cap(source, 256)}, read {age} ago"


def _node_lines(explanation: Explanation) -> Iterator[tuple[int, int, str]]:
    shown = [node for node in explanation.nodes if not node.is_fit][:NODES_SHOWN]
    for node in shown:
        yield 7, 9, f"{cap(node.name, 128)}: {cap(node.said)}"
        for line in _gpu_lines(node):
            yield 9, 11, line
        if node.biggest and node.gpus:
            yield 9, 11, f"most is held by {', '.join(node.biggest)}"
    reasons = explanation.reasons
    if max(reasons.values(), default=0) > len(shown) or len(explanation.nodes) > len(shown):
        told = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        if told:
            yield 7, 9, f"Nodes by reason: {told}"


def _gpu_lines(node: NodeVerdict) -> Iterator[str]:
    """One line for all GPUs of which the same is said."""
    alike: dict[str, list[int]] = {}
    for gpu in node.gpus:
        said = f"{gpu.reason}: {gpu.said}" if gpu.reason else ""
        alike.setdefault(said, []).append(gpu.index)
    for said, indexes in alike.items():
        fits = "fits" if len(indexes) == 1 else "fit"
        yield f"GPU {', '.join(map(str, indexes))} {said or fits}"


def _gate(gate: Gate) -> dict[str, object]:
    return {
        "name": gate.name,
        "verdict": gate.verdict.name.lower().replace("_", "-"),
        "said": gate.said,
        "reason": gate.reason,
        "advice": gate.advice,
        "facts": list(gate.facts),
    }


def _plain(value: NodeVerdict | GpuVerdict | PlacingChange) -> dict[str, object]:
    """A value of the story for JSON, with JSON's names."""
    return {_camel(name): _entry(one) for name, one in msgspec.structs.asdict(value).items()}


def _entry(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(one) if isinstance(one, GpuVerdict) else one for one in value]
    return value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


# Renders the pods that kubelets refused, the last first.

SHOWN: Final = 20
_SENTENCE: Final = 512
_UNKNOWN: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def recent_text(refused: Sequence[RefusedPod], source: str, now: dt.datetime, columns: int) -> str:
    """The refusals for people, folded at `columns`."""
    return folded(_recent_lines(refused, source, now), columns)


def recent_data(refused: Sequence[RefusedPod]) -> list[dict[str, object]]:
    """All refusals, for programs."""
    return [
        {
            "namespace": pod.namespace,
            "pod": pod.name,
            "node": pod.node,
            "at": encode_stamp(pod.at) if pod.at else None,
            "id": refusal_id(pod.message),
            "message": pod.message,
        }
        for pod in _ordered(refused)
    ]


def _recent_lines(
    refused: Sequence[RefusedPod], source: str, now: dt.datetime
) -> Iterator[tuple[int, int, str]]:
    if not refused:
        yield 0, 2, "No kubelet has refused a pod that still exists."
    for pod in _ordered(refused)[:SHOWN]:
        name = f"{cap(pod.namespace, 64)}/{cap(pod.name, 256)}"
        when = ago(pod.at, now) if pod.at else "at an unknown time"
        identifier = refusal_id(pod.message)
        entry = f" [RUNBOOK {identifier}]" if identifier else ""
        yield 0, 2, f"{name} on {cap(pod.node, 128)}, {when}{entry}"
        yield 2, 4, cap(agent_sentence(pod.message), _SENTENCE)
    if len(refused) > SHOWN:
        yield 0, 2, f"{counted(len(refused) - SHOWN, 'older refusal')} not shown: -o json has all"
    yield 0, 2, f"data: {cap(source, 256)}, read now"


def _ordered(refused: Sequence[RefusedPod]) -> list[RefusedPod]:
    return sorted(refused, key=lambda pod: pod.at or _UNKNOWN, reverse=True)


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `explain`."""
    parser = subparsers.add_parser(
        "explain",
        help="explain why a pod is pending or refused, gate by gate",
        description="Explains a pod gate by gate: admission, quota, placement with the figures "
        "of each GPU, binding with the node lock, allocation, start, and what it holds. Then "
        "it names at most three changes, each of which alone would place the pod, tried with a "
        "model of HAMi's scheduler. It reads Pods, Nodes, Events and ResourceQuotas of the API "
        "server, writes nothing and needs no agent. Exits 0 if nothing blocks the pod, 1 if "
        "something does, 3 if the API server cannot be read, 4 if there is no such pod, 5 if a "
        "part of the data is missing.",
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
