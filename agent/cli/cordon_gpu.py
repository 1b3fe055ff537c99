"""The shared part of `hami-agent cordon` and `hami-agent uncordon`."""

import argparse
import asyncio
import contextlib
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent.cli.arguments import TABLE, add_output
from agent.cli.cluster_args import NO_KUBECONFIG, add_cluster, connection_of
from agent.cli.codes import NOT_FOUND, OK, PROBLEM, UNREACHABLE, USAGE, fail
from agent.cli.gpu_action import NAME
from agent.cli.logs import configure
from agent.cli.output import document
from agent.cli.settings_args import looked
from agent.cluster import CORDON, REGISTER, NodeView
from agent.errors import AgentError, ApiConflict, ApiError, ApiForbidden, SettingsError
from agent.hami.register import read_register
from agent.host.process import SystemClock, host_name
from agent.kube.api import KubeNode
from agent.kube.client import Connection, KubeSession, check
from agent.node.devices import CordonEdit, ReportedGpu, cordon_edit, find_gpu, known_gpus
from agent.settings.sources import NodeFacts, Sources

# Cordons a GPU at the API server for HAMi's scheduler, or ends its cordon.

PROGRAM: Final = "hami-agent-cordon"
"""The field manager: what an operator writes does not count as an agent's."""
TRIES: Final = 5
"""Writes that may be refused because the Node changed since it was read."""


class NoSuchGpu(AgentError):  # noqa: N818 -- the state, not the call, is the error
    """The Node, or the GPU on it, does not exist."""


async def plan_cordon(connection: Connection, node: str, name: str, *, cordon: bool) -> CordonEdit:
    """Read the Node and decide what would be written. Raises NoSuchGpu, ApiError, SettingsError.

    `name`: an index or UUID.
    """
    session = KubeSession(connection, random.SystemRandom(), PROGRAM)
    try:
        return _edit(await _read(KubeNode(session, node), node), name, cordon=cordon)
    finally:
        await session.close()


async def write_cordon(connection: Connection, node: str, name: str, *, cordon: bool) -> CordonEdit:
    """Write what is due; other changes of the Node in between are kept.

    Returns what was written: nothing if somebody else did so meanwhile. Raises NoSuchGpu, ApiError,
    SettingsError; ApiConflict: the Node changed between each of five reads and writes.
    """
    session = KubeSession(connection, random.SystemRandom(), PROGRAM)
    api = KubeNode(session, node)
    try:
        for _ in range(TRIES - 1):
            with contextlib.suppress(ApiConflict):
                return await _write(api, node, name, cordon=cordon)
        return await _write(api, node, name, cordon=cordon)
    finally:
        await session.close()


async def _write(api: KubeNode, node: str, name: str, *, cordon: bool) -> CordonEdit:
    seen = await _read(api, node)
    edit = _edit(seen, name, cordon=cordon)
    if edit.changes:
        await api.annotate_as_seen(seen.resource_version, edit.changes)
    return edit


async def _read(api: KubeNode, node: str) -> NodeView:
    seen = await api.get_node()
    if seen is None:
        raise NoSuchGpu(f"the API server knows no Node {node}", remedy="name it with --node")
    return seen


def _edit(node: NodeView, name: str, *, cordon: bool) -> CordonEdit:
    gpus = known_gpus(_reported(node.annotations), node.annotations.get(CORDON))
    gpu = find_gpu(gpus, name)
    if gpu is None:
        known = ", ".join(one.words for one in gpus)
        where = f"Node {node.name} has no GPU {name}"
        if not known:
            raise NoSuchGpu(f"{where}: it has no readable {REGISTER}")
        raise NoSuchGpu(where, remedy=f"it has {known}")
    return cordon_edit(gpu, node.annotations, cordon=cordon)


def _reported(annotations: Mapping[str, str]) -> list[ReportedGpu]:
    gpus = read_register(annotations.get(REGISTER))
    return [ReportedGpu(gpu.uuid, gpu.index) for gpu in gpus]


CODES: Final = (
    "Exits 0 also if there is nothing to change, 1 if it was refused or you said no, 2 without a "
    "terminal and without -y, 3 if the API server does not answer, 4 if there is no such GPU."
)


class CordonPlace(msgspec.Struct, frozen=True):
    """The Node, and the way to the API server."""

    node: str
    connection: Connection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of both verbs."""
    parser.add_argument("gpu", metavar="GPU", type=_name, help="index or UUID")
    parser.add_argument(
        "--node", metavar="NAME", help="the Node (default: that of the agent's settings)"
    )
    add_cluster(parser)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    add_output(parser)


def change(args: argparse.Namespace, environ: Mapping[str, str], *, cordon: bool) -> int:
    """Ask, write, print the result, and return the exit code."""
    configure("error", "auto", environ)
    if not args.yes and not sys.stdin.isatty():
        return fail(args.verb, "there is no terminal to ask on: give -y", USAGE)
    try:
        place = _place(args, environ)
        edit = asyncio.run(plan_cordon(place.connection, place.node, args.gpu, cordon=cordon))
        if edit.changes and not args.yes and not _agreed(edit, place.node, cordon=cordon):
            return fail(args.verb, "nothing was changed", PROBLEM)
        if edit.changes:
            agreed = edit.gpu.uuid  # an index may be another GPU's by now
            edit = asyncio.run(write_cordon(place.connection, place.node, agreed, cordon=cordon))
    except AgentError as error:
        return fail(args.verb, _sentence(error), _code(error))
    if args.output == TABLE:
        sys.stdout.write(_told(edit, place.node, cordon=cordon))
        return OK
    data = {
        "node": place.node,
        "gpu": edit.gpu.index,
        "uuid": edit.gpu.uuid,
        "cordoned": cordon,
        "changed": bool(edit.changes),
    }
    source = f"API server by {place.connection.source}"
    sys.stdout.write(document("Cordon", data, args.output, SystemClock().now(), source))
    return OK


def _name(text: str) -> str:
    if NAME.fullmatch(text) is None or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text[:64]!r} is not an index or a UUID")
    return text


def _place(args: argparse.Namespace, environ: Mapping[str, str]) -> CordonPlace:
    """Where to write. Settings are read only for what nothing else says. Raises SettingsError."""
    node, connection = args.node, connection_of(args, environ)
    if node is None or connection is None:
        read = asyncio.run(looked(Sources(None, environ, {}, host_name())))
        settings = read.taken().settings(NodeFacts())
        node = node or settings.node
        if connection is None and settings.kubeconfig:
            connection = Connection(Path(settings.kubeconfig), context=args.context)
    if connection is None:
        raise SettingsError(NO_KUBECONFIG)
    check(connection)
    return CordonPlace(node, connection)


def _agreed(edit: CordonEdit, node: str, *, cordon: bool) -> bool:
    act = "Cordon" if cordon else "Uncordon"
    sys.stderr.write(f"{act} GPU {edit.gpu.words} of Node {node}? {_effect(cordon=cordon)} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _effect(*, cordon: bool) -> str:
    if cordon:
        return (
            "HAMi's scheduler (2.10 and later) places no new pods on it; pods that run there go on."
        )
    return "HAMi's scheduler may place new pods on it again."


def _told(edit: CordonEdit, node: str, *, cordon: bool) -> str:
    subject = f"GPU {edit.gpu.words} of Node {node}"
    if not edit.changes:
        state = "was cordoned already" if cordon else "was not cordoned"
        return f"{subject} {state}; nothing was changed\n"
    state = "cordoned" if cordon else "no longer cordoned"
    return f"{subject} is {state}. {_effect(cordon=cordon)} This takes up to 15 s.\n"


def _sentence(error: AgentError) -> str:
    if isinstance(error, ApiForbidden):
        return (
            f"{error}. This needs the rights `get nodes` and `patch nodes`, and the agent's own "
            f"account may not write {CORDON}: name an operator's kubeconfig with --kubeconfig"
        )
    return str(error)


def _code(error: AgentError) -> int:
    if isinstance(error, NoSuchGpu):
        return NOT_FOUND
    if isinstance(error, ApiError):
        return PROBLEM if error.status else UNREACHABLE
    return UNREACHABLE if isinstance(error, SettingsError) else PROBLEM
