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

from agent.cli.connections import (
    add_cluster,
    add_socket,
    call,
    connection_of,
    open_session,
)
from agent.cli.main import (
    NOT_FOUND,
    OK,
    PROBLEM,
    UNREACHABLE,
    USAGE,
    NotThere,
    Subparsers,
    Unreachable,
    add_output,
    fail,
    typed,
)
from agent.cli.output import answer
from agent.cli.settings_args import looked
from agent.cluster import CORDON, HANDSHAKE, REGISTER, NodeView
from agent.errors import ApiConflict, ApiForbidden
from agent.hami.register import read_register
from agent.host.process import host_name
from agent.kit.logs import configure
from agent.kube.client import KubeNode
from agent.kube.connection import Connection
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
    True: "HAMi's scheduler (2.10 and later) places no new pods on it; pods that run there go on.",
    False: "HAMi's scheduler may place new pods on it again.",
}
"""What a cordon, or the end of one, does."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verbs `recheck`, `release`, `cordon` and `uncordon`."""
    parser = subparsers.add_parser(
        "recheck", description=_recheck.__doc__, epilog="example: hami-agent recheck 3"
    )
    parser.add_argument(
        "--was-reset",
        action="store_true",
        help="the GPU (with `all`: each GPU) was reset since its last error: begin its cool-down",
    )

    _add_gpu(parser, "an index, a UUID or `all`")
    add_socket(parser)
    add_output(parser)

    parser = subparsers.add_parser(
        "release", description=_release.__doc__, epilog="example: hami-agent release 3"
    )
    _add_gpu(parser, "an index, a UUID or `all`")
    add_socket(parser)
    add_output(parser)

    for verb, act in (("cordon", _cordon), ("uncordon", _uncordon)):
        example = f"example: hami-agent {verb} 3 --node gpu-1"
        parser = subparsers.add_parser(verb, description=act.__doc__, epilog=example)
        _add_gpu(parser, "an index or a UUID")
        parser.add_argument(
            "--node", metavar="NAME", help="the Node (default: that of the agent's settings)"
        )
        add_cluster(parser)
        parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
        add_output(parser)


def _add_gpu(parser: argparse.ArgumentParser, names: str) -> None:
    name = text_where(lambda text: bool(NAME.fullmatch(text)) and text.isprintable(), names)
    parser.add_argument("gpu", metavar="GPU", type=typed(name, names), help=names)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run one of the verbs; return the exit code."""
    verbs = {"recheck": _recheck, "release": _release, "cordon": _cordon, "uncordon": _uncordon}
    return verbs[args.verb](args, environ)


def _act(
    args: argparse.Namespace,
    action: str,
    tell: Callable[[Mapping[str, Any]], tuple[list[str], bool]],
) -> int:
    """Request the action, print the answer, and return the exit code.

    It is 0 or 1 by `tell`, which renders the answer's data for people, 3 if no agent answers, 4 if
    there is no such GPU.
    """
    target = f"/api/v1/gpus/{quote(args.gpu, safe='')}:{action}"
    status, text = call(args.socket, "POST", target, DEADLINES[action])
    if status != 200:
        return fail(args.verb, text.strip(), NOT_FOUND if status == 404 else PROBLEM)

    try:
        said = json.loads(text)
        lines, is_good = tell(said["data"])
    except (ValueError, LookupError, TypeError):
        return fail(args.verb, f"{args.socket} did not answer as an agent", UNREACHABLE)

    answer(args.output, said["kind"], said["data"], lines, source=str(args.socket))
    return OK if is_good else PROBLEM


def _recheck(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Makes the running agent probe a GPU now, or all.

    It prints the health of each, why, and what is needed until it is ok. A released GPU is taken
    back. The agent resets nothing and does not shorten the cool-down. With --was-reset you state
    that you reset the GPU since its last error, which drivers before 570 do not report. The exit
    code is 0 if each GPU is served, 1 if one is not, 3 if no agent answers, and 4 if there is no
    such GPU.
    """
    return _act(args, "was-reset" if args.was_reset else "recheck", _recheck_text)


def _recheck_text(data: Mapping[str, Any]) -> tuple[list[str], bool]:
    """What a recheck found, as lines; and whether each GPU is served."""
    if "gpus" in data:
        each = [_recheck_text(gpu) for gpu in data["gpus"]]
        if not each:
            return ["this node has no GPU"], False

        lines = [line for told, _ in each for line in ("", *told)][1:]
        return lines, all(is_served for _, is_served in each)

    served = "served" if data["serving"] else "not served"

    answer = {
        "passed": "it answered",
        "failed": "it answered with an error",
        "lost": "the driver has lost it",
        "refused": "the driver refuses calls about it",
        "silent": "it did not answer",
    }.get(data["probe"]["outcome"], data["probe"]["outcome"])

    words = f" ({data['probe']['text']})" if data["probe"]["text"] else ""
    index = "of unknown index" if data["gpu"] is None else data["gpu"]

    lines = [
        f"GPU {index} ({data['uuid']}): {answer}{words}",
        f"{data['condition']} since {data['since']}, {served}",
    ]
    if data["text"]:
        lines.append(data["text"])

    lines += [f"needed: {step}" for step in data["missing"]]
    return lines, data["serving"] is True


def _release(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Makes the running agent release a GPU, or all.

    Until `hami-agent recheck` takes it back, no new pod gets it and the agent neither opens nor
    asks it. Pods that have it go on, and are named: a reset takes the GPU from them. The exit code
    is 0 if the GPU is free, 1 if the agent still holds it or pods have it, 3 if no agent answers,
    and 4 if there is no such GPU.
    """
    return _act(args, "release", _release_text)


def _release_text(data: Mapping[str, Any]) -> tuple[list[str], bool]:
    """What a release did, as lines; and whether the GPUs are free for work on them."""
    gpus = ", ".join(data["gpus"])
    lines = [f"{gpus}: released; `hami-agent recheck` takes it back"]
    if len(data["gpus"]) > 1:
        lines = [f"{gpus}: released; `hami-agent recheck all` takes them back"]

    if data["obstacle"]:
        lines = [
            f"{gpus}: no new pod gets it, but the agent still holds it open: {data['obstacle']}",
            "release it again later, or stop the agent for the work",
        ]

    lines += [f"held by pod {pod}: delete it first" for pod in data["heldBy"]]
    return lines, data["released"] is True and not data["heldBy"]


def _cordon(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Writes the GPU into the Node's annotation hami.io/device-cordon.

    HAMi's scheduler (2.10 and later) then places no new pods on it. Pods that run there go on, and
    the agent and the kubelet offer its slices as before. It asks first. Exits 0 also if there is
    nothing to change, 1 if it was refused or you said no, 2 without a terminal and without -y, 3 if
    the API server does not answer, 4 if there is no such GPU.
    """
    return _change(args, environ, cordon=True)


def _uncordon(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Removes the GPU from the Node's annotation hami.io/device-cordon.

    HAMi's scheduler may then place new pods on it again. It asks first. Exits 0 also if there is
    nothing to change, 1 if it was refused or you said no, 2 without a terminal and without -y, 3 if
    the API server does not answer, 4 if there is no such GPU.
    """
    return _change(args, environ, cordon=False)


def _change(args: argparse.Namespace, environ: Mapping[str, str], *, cordon: bool) -> int:
    configure("error", "auto", environ)
    if not args.yes and not sys.stdin.isatty():
        return fail(args.verb, "there is no terminal to ask on: give -y", USAGE)

    def agreed(gpu: ReportedGpu) -> bool:
        if args.yes:
            return True

        question = f"{args.verb.capitalize()} GPU {gpu.words} of Node {node}?"
        sys.stderr.write(f"{question} {EFFECTS[cordon]} [y/N] ")
        sys.stderr.flush()

        return sys.stdin.readline().strip().lower() in {"y", "yes"}

    node, connection = _place(args, environ)
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
        told = f"is {state}. {EFFECTS[cordon]} This takes up to 15 s."

    data = {"node": node, "gpu": gpu.index, "uuid": gpu.uuid, "cordoned": cordon}
    data["changed"] = is_changed
    lines = [f"GPU {gpu.words} of Node {node} {told}"]
    answer(args.output, "Cordon", data, lines, source=f"API server by {connection.source}")

    return OK


def _place(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[str, Connection]:
    """The Node, and the way to the API server. Raises SettingsError, Unreachable.

    Settings are read only for what nothing else says.
    """
    try:
        connection = connection_of(args.kubeconfig, args.context, environ)
        if args.node is not None:
            return args.node, connection
    except Unreachable:
        connection = None

    read = asyncio.run(looked(Sources(None, environ, {}, host_name())))
    settings = read.taken().settings(NodeFacts())
    if connection is None and settings.kubeconfig:
        connection = Connection(Path(settings.kubeconfig), context=args.context)

    return args.node or settings.node, connection or connection_of(
        args.kubeconfig, args.context, environ
    )


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
        index = "" if gpu.index is None else str(gpu.index)
        if name == index or name.lower() == gpu.uuid.lower():
            return gpu

    where = f"Node {node.name} has no GPU {name}"
    if not gpus:
        raise NotThere(f"{where}: it has no readable {REGISTER}")

    raise NotThere(where, remedy=f"it has {', '.join(gpu.words for gpu in gpus.values())}")
