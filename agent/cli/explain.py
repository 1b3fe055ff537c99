"""`hami-agent explain`: why a pod is where it is, gate by gate, and what would place it."""

import argparse
import datetime as dt
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from agent.cli.connections import add_cluster, ask, connection_of
from agent.cli.main import Exit, NotThere, Subparsers, add_output, fail
from agent.cli.output import UNFOLDED, FoldedLine, answer, folded, table, working
from agent.cli.support import HINT
from agent.errors import ApiNotFound, cap
from agent.kit.logs import configure
from agent.kit.timing import SystemClock
from agent.kit.units import Column, age, gib, percent
from agent.kube.client import KubeSession, default_namespace
from agent.kube.reader import ClusterReader, ClusterSnapshot, decode_listed
from agent.ports import Clock
from agent.sandbox.explain.decide import explain_pod
from agent.sandbox.explain.story import Explanation, GateVerdict
from agent.sandbox.scheduler.model import SchedulerSettings

KINDS: Final = {
    **dict.fromkeys(("pod", "po"), "Pod"),
    **dict.fromkeys(("deployment", "deploy"), "Deployment"),
    **dict.fromkeys(("replicaset", "rs"), "ReplicaSet"),
    **dict.fromkeys(("statefulset", "sts"), "StatefulSet"),
    **dict.fromkeys(("daemonset", "ds"), "DaemonSet"),
    **dict.fromkeys(("cronjob", "cj"), "CronJob"),
    "job": "Job",
}
"""As people write them for kubectl, before the name; most also with an s at the end."""

NODES_SHOWN: Final = 5
"""The Nodes nearest to a fit that people see; programs get all that were judged."""

_WORDS: Final = {
    GateVerdict.PASSED: ("ok", "green"),
    GateVerdict.BLOCKED: ("NO", "red"),
    GateVerdict.WAITING: ("wait", "yellow"),
    GateVerdict.NOTED: ("note", "yellow"),
    GateVerdict.NOT_REACHED: ("--", "faint"),
    GateVerdict.UNKNOWN: ("??", "yellow"),
}
"""The word of a verdict, and its colour."""

_FIGURES: Final = (Column(title, right=True) for title in ("FREE", "FREE CORES", "SLICES"))
_GPU_COLUMNS: Final = (Column("GPU"), *_FIGURES, Column("WHY NOT"))


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `explain`."""
    parser = subparsers.add_parser(
        "explain",
        description="Explains a pod gate by gate: admission, quota, placement with the figures "
        "of each GPU, binding with the node lock, allocation, start, and what it holds. Then "
        "it names at most three changes, each of which alone would place the pod, tried with a "
        "model of HAMi's scheduler. Of a workload, such as deployment/web, it explains the pod "
        "that is furthest from running. It reads Pods, Nodes, Events and ResourceQuotas of the API "
        "server, writes nothing and needs no agent. Exits 0 if nothing blocks the pod, 1 if "
        "something does, 3 if the API server cannot be read, 4 if there is no such pod, 5 if a "
        "part of the data is missing.",
        epilog="example: hami-agent explain team-a/train-0 --kubeconfig ~/.kube/config",
    )

    told = "POD, NAMESPACE/POD, or KIND/NAME as for kubectl"
    parser.add_argument("pod", metavar="POD", help=told)
    parser.add_argument("-n", "--namespace", metavar="NAME", help="the pod's namespace")
    add_cluster(parser)
    name = SchedulerSettings().scheduler_name
    told = "name of HAMi's scheduler (default %(default)s)"
    parser.add_argument("--scheduler-name", default=name, metavar="NAME", help=told)
    add_output(parser)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the explanation and return the exit code."""
    configure("error", "auto", environ)
    space, slash, name = args.pod.rpartition("/")
    if not name or "/" in space or (slash and not space):
        said = f"{cap(args.pod, 64)!r} is not a pod: write POD, NAMESPACE/POD or KIND/NAME"
        return fail("explain", said, Exit.USAGE)

    word = space.lower()
    kind = KINDS.get(word) or KINDS.get(word.removesuffix("s"), "")
    connection = connection_of(args.kubeconfig, args.context, environ)
    source, clock = f"API server by {connection.source}", SystemClock()
    namespace = "" if kind else space
    namespace = namespace or args.namespace or default_namespace(connection)
    with working("reading the pod, Nodes and pods with GPUs"):
        found = ask(
            connection,
            "hami-agent-explain",
            lambda api: read_pod(api, namespace, kind, name, clock),
        )

    at, settings = clock.now(), SchedulerSettings(scheduler_name=args.scheduler_name)
    with working(f"trying changes; Nodes: {len(found.nodes)}"):
        explanation = explain_pod(found, at, settings)

    lines = explanation_lines(explanation, found.taken, source, at)
    shown = folded(lines, environ)
    answer(args.output, "Explanation", explanation, shown, at=at, source=source)
    if explanation.missing:
        return Exit.INCOMPLETE

    return Exit.PROBLEM if explanation.blocked else Exit.OK


async def read_pod(
    session: KubeSession, namespace: str, kind: str, name: str, clock: Clock
) -> ClusterSnapshot:
    """Read the pod, or that of the workload which is furthest from running, and its cluster.

    Raises ApiError: the pod cannot be read; NotThere: there is none of that name or workload.
    """
    reader, where = ClusterReader(session), f"in the namespace {cap(namespace, 64)}"
    if kind not in ("", "Pod"):
        pods = await reader.read_list("pods", decode_listed, namespace=namespace)
        owned = [(pod.rank, pod.name) for pod in pods if pod.is_of(kind, name)]
        if not owned:
            raise NotThere(f"no pod of {kind} {cap(name, 256)} is {where}")
        name = min(owned)[1]

    try:
        return await reader.snapshot(namespace, name, clock)
    except ApiNotFound as missing:
        raise NotThere(f"there is no pod {cap(name, 256)} {where}") from missing


def explanation_lines(
    explanation: Explanation, taken: dt.datetime, source: str, now: dt.datetime
) -> Iterator[FoldedLine]:
    """The explanation for people. `taken`: when the pod was read. `source`: where."""
    yield FoldedLine(explanation.headline)
    for gate in (one for one in explanation.gates if one.verdict is not GateVerdict.NOT_REACHED):
        reason = f" [RUNBOOK {gate.reason}]" if gate.reason else ""
        word, colour = _WORDS[gate.verdict]
        yield FoldedLine(f"{word:<4} {gate.name:<10} {gate.said}{reason}", 0, 5, word, colour)
        yield from (FoldedLine(fact, 7, 9) for fact in gate.facts)
        if gate.name == "placement" and gate.verdict is GateVerdict.BLOCKED:
            yield from _node_lines(explanation)

        if gate.advice:
            yield FoldedLine(f"do: {gate.advice}", 7, 9)

    if rest := [gate.name for gate in explanation.gates if gate.verdict is GateVerdict.NOT_REACHED]:
        word, colour = _WORDS[GateVerdict.NOT_REACHED]
        yield FoldedLine(f"{word}   not reached: {', '.join(rest)}", 0, 5, word, colour)

    if explanation.tried:
        said = "No single change that was tried with the scheduler's model places it."
        if explanation.changes:
            said = "Changes that would place it, each alone (tried with the scheduler's model):"
        yield FoldedLine(said)

    for number, change in enumerate(explanation.changes, 1):
        yield FoldedLine(f"({number}) {change.said} -> {cap(change.node, 128)}", 2, 6)
        if change.paste:
            yield FoldedLine(change.paste, 6, 8)

    yield from (FoldedLine(f"missing: {text}") for text in explanation.missing)
    if any(gate.reason for gate in explanation.gates):
        yield FoldedLine(HINT)

    yield FoldedLine(f"data: {cap(source, 256)}, read {age(taken, now)} ago")


def _node_lines(explanation: Explanation) -> Iterator[FoldedLine]:
    """The Nodes that do not fit, each with a table of its GPUs and what its agent said."""
    shown = [node for node in explanation.nodes if not node.is_fit][:NODES_SHOWN]
    for node in shown:
        yield FoldedLine(f"{cap(node.name, 128)}: {cap(node.said)}", 7, 9)
        # One line for all GPUs of which the same is said.
        alike: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        for gpu in node.gpus:
            cells = (
                f"{gib(gpu.registered_mib - gpu.promised_mib, '')} of {gib(gpu.registered_mib)}",
                f"{gpu.core_percent - gpu.promised_percent} of {percent(gpu.core_percent)}",
                f"{gpu.slots - gpu.used_slots} of {gpu.slots}",
                f"{gpu.reason}: {gpu.said}" if gpu.said else gpu.reason or "fits",
            )
            alike[cells].append(str(gpu.index))

        rows = [(",".join(indexes), *cells) for cells, indexes in alike.items()]
        lines = list(table(_GPU_COLUMNS, rows, UNFOLDED)) if rows else []
        if node.biggest and node.gpus:
            lines.append(f"most is held by {', '.join(node.biggest)}")

        yield from (FoldedLine(line, 9, 11) for line in (*lines, *node.events))

    reasons = explanation.nodes_by_reason
    if reasons and (max(reasons.values()) > len(shown) or len(explanation.nodes) > len(shown)):
        told = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        yield FoldedLine(f"Nodes by reason: {told}", 7, 9)
