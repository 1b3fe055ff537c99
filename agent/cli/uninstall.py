"""`hami-agent uninstall`: removes what the agent wrote on its Node, after the agent stopped."""

import argparse
import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from agent.app.uninstalling import (
    RESOURCE,
    Cleaned,
    Uninstalled,
    uninstall_everywhere,
    uninstall_here,
)
from agent.cli.arguments import TABLE, add_output
from agent.cli.codes import NOT_FOUND, OK, PROBLEM, UNREACHABLE, USAGE
from agent.cli.documents import document
from agent.cli.logs import configure
from agent.cli.main import Subparsers
from agent.cli.settings_args import add_settings, flags, sources, started
from agent.core.errors import AgentError, ApiError, ApiNotFound, SettingsError
from agent.host.clock import SystemClock
from agent.host.kube.connection import Connection
from agent.settings.sources import NodeFacts

IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
OF_USE = (
    "node.name",
    "node.kubeconfig",
    "sharing.resourceName",
    "paths.state",
    "paths.run",
    "library.hookPath",
)
"""The settings that uninstall uses."""

EVERYWHERE = ("--kubeconfig", "--resource-name")
"""The flags of settings that --all-nodes uses."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `uninstall`."""
    parser = subparsers.add_parser(
        "uninstall",
        help="remove what the agent wrote on the Node",
        description="Removes the GPU report and the agent's condition from the Node of this "
        "host. It refuses while pods with GPUs or an agent run here, or a device plugin serves "
        "after 30 s. It releases containers that a killed agent held back, and changes nothing "
        "else on the host and no pod; a second call does nothing. "
        "Exits 1 if it refused or something of an agent is left, 3 without the API server, 4 "
        "without the Node.",
        epilog="example: hami-agent uninstall --node-name gpu-1 -o json",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="even if pods with GPUs run here or a device plugin serves; not beside an agent",
    )
    everywhere = parser.add_argument_group(
        "all Nodes",
        "of a cluster, with an account that may change them, even if pods with GPUs run there. A "
        "Node on which a device plugin serves is skipped. Only the settings --kubeconfig and "
        "--resource-name are used",
    )
    everywhere.add_argument(
        "--all-nodes",
        action="store_true",
        help="clean all Nodes; it first waits up to 90 s until the agents' pods have ended",
    )
    everywhere.add_argument("--namespace", metavar="NAME", help="namespace of the agents' pods")
    everywhere.add_argument(
        "--selector", metavar="LABELS", help="labels of the agents' pods, as k=v,k=v"
    )
    add_output(parser)
    add_settings(parser, only=OF_USE)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the verb, print a line for each change, and return the exit code."""
    configure("error", "auto", environ)
    if mistake := _misused(args, environ):
        _say(mistake)
        return USAGE
    as_text = args.output == TABLE
    try:
        done = asyncio.run(_done(args, environ, as_text=as_text))
    except AgentError as error:
        if not as_text:
            _write_document(args, Uninstalled(), str(error))
        _say(str(error))
        return _code(error, everywhere=args.all_nodes)
    if as_text:
        _write_rest(done)
    else:
        _write_document(args, done, "")
    return OK if done.is_complete else PROBLEM


def _say(text: str) -> None:
    sys.stderr.write(f"hami-agent uninstall: {text}\n")
    sys.stderr.flush()


def _misused(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """What is wrong with the command line; empty if nothing is."""
    if {args.all_nodes} != {bool(args.namespace), bool(args.selector)}:
        return "--all-nodes, --namespace and --selector go together"
    if not args.all_nodes:
        return ""
    given = [flag for flag in flags(args) if flag not in EVERYWHERE]
    given += ["--force"] * args.force + ["--config"] * bool(args.config)
    if given:
        return f"{', '.join(sorted(given))} would have no effect with --all-nodes: leave it out"
    if not _kubeconfig(args, environ) and IN_CLUSTER not in environ:
        return "no kubeconfig, and this is not a pod: give --kubeconfig, or set KUBECONFIG"
    return ""


def _kubeconfig(args: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """The kubeconfig for --all-nodes; in a pod its service account comes before KUBECONFIG."""
    named = flags(args).get("--kubeconfig")
    return named or (None if IN_CLUSTER in environ else environ.get("KUBECONFIG"))


async def _done(
    args: argparse.Namespace, environ: Mapping[str, str], *, as_text: bool
) -> Uninstalled:
    def show(node: Cleaned) -> None:
        if as_text:
            sys.stdout.writelines(_lines(node))
            sys.stdout.flush()

    if not args.all_nodes:
        start = await started(sources(args, environ))
        settings = start.taken().settings(NodeFacts())
        return await uninstall_here(settings, environ, show, _say, force=args.force)
    # No settings are read: a release with invalid settings must be uninstallable. Its Job has the
    # variables of the release.
    named = _kubeconfig(args, environ)
    connection = Connection(Path(named) if named else None, environment=environ)
    resource = flags(args).get("--resource-name") or RESOURCE
    return await uninstall_everywhere(
        connection, resource, args.namespace, args.selector, show, _say
    )


def _code(error: AgentError, *, everywhere: bool) -> int:
    """The exit code; with --all-nodes, a SettingsError is about the way to the API server."""
    if everywhere and isinstance(error, SettingsError):
        return UNREACHABLE
    if isinstance(error, ApiNotFound):
        return NOT_FOUND
    is_silent = isinstance(error, ApiError) and not error.status
    return UNREACHABLE if is_silent else PROBLEM


def _lines(node: Cleaned) -> list[str]:
    lines = [f"{node.node}: removed {', '.join(node.removed)}\n"] if node.removed else []
    lines += [f"{node.node}: skipped: {node.skipped}\n"] if node.skipped else []
    lines += [f"{node.node}: something is left: {node.failure}\n"] if node.failure else []
    return lines


def _write_rest(done: Uninstalled) -> None:
    if not any(_lines(node) for node in done.nodes):
        sys.stdout.write("nothing of the agent's was found\n")
    sys.stdout.writelines(f"this host: left {path}: {why}\n" for path, why in done.host.items())


def _write_document(args: argparse.Namespace, done: Uninstalled, refusal: str) -> None:
    data = {
        "ok": not refusal and done.is_complete,
        "refusal": refusal,
        "nodes": [msgspec.to_builtins(node) for node in done.nodes],
        "leftOnHost": dict(done.host),
    }
    sys.stdout.write(document("Uninstallation", data, args.output, SystemClock().now()))
