"""The verbs that act on GPUs of a node: cordon and uncordon, recheck and release.

`cordon` and `uncordon` write the Node at the API server and need no agent; `recheck` and `release`
ask the running agent by its socket.
"""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from agent.cli import main as verbs
from agent.cli.connections import add_cluster, add_socket, call, connection_of, open_session
from agent.cli.logs import configure
from agent.cli.main import OK, PROBLEM, NotThere, Subparsers, Unreachable, fail
from agent.cli.output import answer
from agent.cli.settings_args import looked
from agent.cluster import CORDON, HANDSHAKE, REGISTER, NodeView
from agent.errors import ApiConflict, ApiForbidden
from agent.hami.register import read_register
from agent.host.process import host_name
from agent.kube.api import KubeNode
from agent.kube.client import Connection
from agent.node.devices import ReportedGpu, read_cordon
from agent.setting import text_where
from agent.settings.sources import NodeFacts, Sources

PROGRAM: Final = "hami-agent-cordon"
"""The field manager: what an operator writes does not count as an agent's."""

TRIES: Final = 5
"""Writes that may be refused because the Node changed since it was read."""

NAME: Final = re.compile(r"[^/:]{1,64}")
"""A name of a GPU that the agent's HTTP server accepts."""

DEADLINES: Final = {"recheck": 10.0, "was-reset": 10.0, "release": 15.0}
"""Seconds for each action of the agent."""

EFFECTS: Final = {
    "cordon": "HAMi's scheduler (2.10 and later) places no new pods on it; pods that run there "
    "go on.",
    "uncordon": "HAMi's scheduler may place new pods on it again.",
}
"""What a cordon, or the end of one, does."""

_ASKS: Final = (
    " It asks first. Exits 0 also if there is nothing to change, 1 if it was refused or you said "
    "no, 2 without a terminal and without -y, 3 if the API server does not answer, 4 if there is "
    "no such GPU."
)

DESCRIPTIONS: Final = {
    "recheck": "Makes the running agent probe a GPU now, or all. It prints the health of each, "
    "why, and what is needed until it is ok. A released GPU is taken back. The agent resets "
    "nothing and does not shorten the cool-down. With --was-reset you state that you reset the GPU "
    "since its last error, which drivers before 570 do not report. The exit code is 0 if each GPU "
    "is served, 1 if one is not, 3 if no agent answers, and 4 if there is no such GPU.",
    "release": "Makes the running agent release a GPU, or all. Until `hami-agent recheck` takes it "
    "back, no new pod gets it and the agent neither opens nor asks it. Pods that have it go on, "
    "and are named: a reset takes the GPU from them. The exit code is 0 if the GPU is free, 1 if "
    "the agent still holds it or pods have it, 3 if no agent answers, and 4 if there is no such "
    "GPU.",
    "cordon": "Writes the GPU into the Node's annotation hami.io/device-cordon. HAMi's scheduler "
    "(2.10 and later) then places no new pods on it. Pods that run there go on, and the agent and "
    "the kubelet offer its slices as before. For work on a GPU: cordon it, delete the pods that "
    "hold it, `release` it, do the work, `recheck` it, and uncordon it. For work on the whole "
    "node: `kubectl cordon NODE`, `kubectl drain NODE --ignore-daemonsets`, the work, and "
    f"`kubectl uncordon NODE`.{_ASKS}",
    "uncordon": "Removes the GPU from the Node's annotation hami.io/device-cordon. HAMi's "
    f"scheduler may then place new pods on it again.{_ASKS}",
}
"""What the help of each verb says."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verbs `recheck`, `release`, `cordon` and `uncordon`."""
    for verb, text in DESCRIPTIONS.items():
        of_node = verb in EFFECTS
        names, place = "an index or a UUID", " --node gpu-1"
        if not of_node:
            names, place = "an index, a UUID or `all`", ""

        example = f"example: hami-agent {verb} 3{place}"
        parser = subparsers.add_parser(verb, description=text, epilog=example)
        name = text_where(lambda text: bool(NAME.fullmatch(text)) and text.isprintable(), names)
        parser.add_argument("gpu", metavar="GPU", type=verbs.typed(name, names), help=names)

        if verb == "recheck":
            parser.add_argument(
                "--was-reset",
                action="store_true",
                help="the GPU (with `all`: each GPU) was reset since its last error: begin its "
                "cool-down",
            )

        if of_node:
            parser.add_argument(
                "--node", metavar="NAME", help="the Node (default: that of the agent's settings)"
            )
            add_cluster(parser)
            parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
        else:
            add_socket(parser)

        verbs.add_output(parser)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run one of the verbs; return the exit code.

    That of `recheck` and `release` is 0 or 1 by the answer of the agent, 3 if none answers, 4 if
    there is no such GPU.
    """
    if args.verb in EFFECTS:
        return _change(args, environ)

    action = "was-reset" if vars(args).get("was_reset") else args.verb
    target = f"/api/v1/gpus/{quote(args.gpu, safe='')}:{action}"
    status, text = call(args.socket, "POST", target, DEADLINES[action])
    if status != 200:
        return fail(args.verb, text.strip(), verbs.NOT_FOUND if status == 404 else PROBLEM)

    try:
        said = json.loads(text)
        lines, is_good = (_release_text if args.verb == "release" else _recheck_text)(said["data"])
    except (ValueError, LookupError, TypeError):
        return fail(args.verb, f"{args.socket} did not answer as an agent", verbs.UNREACHABLE)

    answer(args.output, said["kind"], said["data"], lines, source=str(args.socket))
    return OK if is_good else PROBLEM


def _recheck_text(data: Mapping[str, Any]) -> tuple[list[str], bool]:
    """What a recheck found, as lines; and whether each GPU is served."""
    if "gpus" in data:
        each = [_recheck_text(gpu) for gpu in data["gpus"]]
        lines = [line for told, _ in each for line in ("", *told)][1:]
        return lines or ["this node has no GPU"], bool(each) and all(served for _, served in each)

    answered = {
        "passed": "it answered",
        "failed": "it answered with an error",
        "lost": "the driver has lost it",
        "refused": "the driver refuses calls about it",
        "silent": "it did not answer",
    }.get(data["probe"]["outcome"], data["probe"]["outcome"])

    words = f" ({data['probe']['text']})" if data["probe"]["text"] else ""
    index = "of unknown index" if data["gpu"] is None else data["gpu"]
    served = "served" if data["serving"] else "not served"
    lines = [
        f"GPU {index} ({data['uuid']}): {answered}{words}",
        f"{data['condition']} since {data['since']}, {served}",
        *filter(None, [data["text"]]),
        *(f"needed: {step}" for step in data["missing"]),
    ]
    return lines, data["serving"] is True


def _release_text(data: Mapping[str, Any]) -> tuple[list[str], bool]:
    """What a release did, as lines; and whether the GPUs are free for work on them."""
    gpus, holders = ", ".join(data["gpus"]), data["heldBy"]
    what, them = ("recheck all", "them") if len(data["gpus"]) > 1 else ("recheck", "it")
    lines = [f"{gpus}: still held by pod {pod}: delete it first" for pod in holders]

    if data["obstacle"]:
        told = f"{gpus}: no new pod gets {them}, but the agent still holds {them} open: "
        lines.append(told + data["obstacle"])
        lines.append(f"release {them} again later, or stop the agent for the work")
    elif holders:
        lines.append(f"no new pod gets {them}; release {them} again until no pod is named")
    else:
        lines.append(f"{gpus}: released; `hami-agent {what}` takes {them} back")

    return lines, data["released"] is True and not holders


def _change(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Cordon or uncordon the GPU, print what became of it and return the exit code."""
    configure("error", "auto", environ)
    if not args.yes and not sys.stdin.isatty():
        return fail(args.verb, "there is no terminal to ask on: give -y", verbs.USAGE)

    def agreed(gpu: ReportedGpu) -> bool:
        question = f"{args.verb.capitalize()} GPU {gpu.words} of Node {node}?"
        if not args.yes:
            sys.stderr.write(f"{question} {EFFECTS[args.verb]} [y/N] ")
            sys.stderr.flush()
        return args.yes or sys.stdin.readline().strip().lower() in {"y", "yes"}

    node, connection = _place(args, environ)
    cordon = args.verb == "cordon"
    try:
        gpu, is_changed = asyncio.run(edit_cordon(connection, node, args.gpu, agreed, on=cordon))
    except ApiForbidden as error:
        text = (
            f"{error}. This needs the rights `get nodes` and `patch nodes`, and the agent's own "
            f"account may not write {CORDON}: name an operator's kubeconfig with --kubeconfig"
        )
        return fail(args.verb, text, PROBLEM)

    if is_changed is None:
        return fail(args.verb, "nothing was changed", PROBLEM)

    told = f"was {'cordoned already' if cordon else 'not cordoned'}; nothing was changed"
    if is_changed:
        state = "cordoned" if cordon else "no longer cordoned"
        told = f"is {state}. {EFFECTS[args.verb]} This takes up to 15 s."

    data = {"node": node, "gpu": gpu.index, "uuid": gpu.uuid, "cordoned": cordon}
    answer(
        args.output,
        "Cordon",
        data | {"changed": is_changed},
        [f"GPU {gpu.words} of Node {node} {told}"],
        source=f"API server by {connection.source}",
    )
    return OK


def _place(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[str, Connection]:
    """The Node, and the way to the API server. Raises SettingsError, Unreachable.

    Settings are read only for what nothing else says.
    """
    unreachable, connection = None, None
    try:
        connection = connection_of(args.kubeconfig, args.context, environ)
        if args.node is not None:
            return args.node, connection
    except Unreachable as error:
        unreachable = error

    read = asyncio.run(looked(Sources(None, environ, {}, host_name())))
    settings = read.taken().settings(NodeFacts())
    if unreachable is not None and not settings.kubeconfig:
        raise unreachable

    own = Connection(Path(settings.kubeconfig or ""), context=args.context)
    return args.node or settings.node, connection or own


async def edit_cordon(
    connection: Connection, node: str, name: str, agreed: Callable[[ReportedGpu], bool], *, on: bool
) -> tuple[ReportedGpu, bool | None]:
    """Cordon the GPU of that index or UUID, or with `on` False end that; the GPU, if it changed.

    None instead: `agreed`, which is asked once, did not agree. A scheduler takes in a cordon only
    when it reads the Node's report anew. Removing the handshake makes releases from 2.9 on do so
    within 15 s (HAMi v2.10 pkg/device/devices.go, CheckHealth). Raises NotThere, ApiError,
    SettingsError; ApiConflict: the Node changed between each of five reads and writes.
    """
    is_agreed, tries = False, TRIES
    async with open_session(connection, PROGRAM) as session:
        api = KubeNode(session, node)
        while True:
            seen = await api.get_node()
            if seen is None:
                said = f"the API server knows no Node {node}"
                raise NotThere(said, remedy="name it with --node")

            gpu, listed = _named(seen, name), read_cordon(seen.annotations.get(CORDON))
            if (gpu.uuid in listed) is on:
                return gpu, False

            if not (is_agreed or agreed(gpu)):
                return gpu, None

            is_agreed, name = True, gpu.uuid  # an index may be another GPU's by now
            kept = (*listed, gpu.uuid) if on else [uuid for uuid in listed if uuid != gpu.uuid]
            changes: dict[str, str | None] = {CORDON: ",".join(kept) or None}
            changes |= {HANDSHAKE: None} if HANDSHAKE in seen.annotations else {}

            # The write is refused if the Node changed since: what others wrote in between is kept.
            try:
                await api.annotate_node(changes, seen.resource_version)
            except ApiConflict:
                tries -= 1
                if not tries:
                    raise
            else:
                return gpu, True


def _named(node: NodeView, name: str) -> ReportedGpu:
    """The GPU of that index or UUID, reported or only in the cordon. Raises NotThere."""
    reported = read_register(node.annotations.get(REGISTER))
    gpus = {gpu.uuid: ReportedGpu(gpu.uuid, gpu.index) for gpu in reported}
    listed = read_cordon(node.annotations.get(CORDON))
    gpus |= {uuid: ReportedGpu(uuid) for uuid in listed if uuid not in gpus}
    for gpu in gpus.values():
        if name.lower() == gpu.uuid.lower() or (gpu.index is not None and name == str(gpu.index)):
            return gpu

    known = ", ".join(gpu.words for gpu in gpus.values())
    unknown = f"Node {node.name} has no GPU {name}"
    if not known:
        unknown += f": it has no readable {REGISTER}"
    raise NotThere(unknown, remedy=f"it has {known}" if known else "")
