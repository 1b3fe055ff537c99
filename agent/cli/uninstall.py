"""`hami-agent uninstall`: take what the agent wrote off its Node, once it is stopped."""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from agent.app.uninstalling import InUse, Uninstalled, uninstall_everywhere, uninstall_here
from agent.cli.arguments import add_output
from agent.cli.codes import NOT_FOUND, OK, PROBLEM, UNREACHABLE, USAGE
from agent.cli.logs import configure
from agent.cli.main import Subparsers
from agent.cli.settings_args import add_settings, flags, sources, started
from agent.cli.settings_view import API_VERSION
from agent.core.errors import AgentError, ApiError, ApiNotFound, SettingsError
from agent.core.node.leftovers import RESOURCE, Agents, Cleaned, LeftoverOutcome
from agent.host.kube.connection import Connection
from agent.settings.profiles import NodeFacts

BY_HAND = "clean it by hand when the pod is gone: deploy/README.md, Uninstall"

IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
OF_USE = (
    "node.name",
    "node.kubeconfig",
    "sharing.resourceName",
    "paths.state",
    "paths.run",
    "library.hookPath",
)
"""The settings by which the Node and what is on this host are found."""

EVERYWHERE = ("--kubeconfig", "--resource-name")
"""Flags of settings that count with --all-nodes."""


def add_parser(subparsers: Subparsers) -> None:
    """The verb `uninstall`."""
    parser = subparsers.add_parser(
        "uninstall",
        help="take what the agent wrote off the Node",
        description="Takes the agent's annotations and its condition off the Node of this host, "
        "once no device plugin serves there, for which it waits 30 s, and says what stays and why. "
        "Nothing of the host and no pod is touched; a second call finds nothing to do. Exits 1 if "
        "it refused or something of an agent's is left, 3 without the API server, 4 without the "
        "Node.",
        epilog="example: hami-agent uninstall --node-name gpu-1 -o json",
    )
    parser.add_argument("--force", action="store_true", help="even if pods with GPUs run here")
    everywhere = parser.add_argument_group(
        "all Nodes",
        "of a cluster, with an account that may; a Node on which another plugin serves or was the "
        "last to report is left. Of the settings, only --kubeconfig and --resource-name count",
    )
    everywhere.add_argument(
        "--all-nodes",
        action="store_true",
        help="when the agents' pods have ended, for which it waits 90 s",
    )
    everywhere.add_argument("--namespace", metavar="NAME", help="of the agents' pods")
    everywhere.add_argument("--selector", metavar="LABELS", help="of the agents' pods, as k=v,k=v")
    add_output(parser)
    add_settings(parser, only=OF_USE)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Do it, tell of each Node, and return the exit code."""
    configure("error", "auto", environ)
    if said := _misused(args, environ):
        _say(said)
        return USAGE
    as_text = args.output == "text"
    try:
        done = asyncio.run(_done(args, environ, as_text=as_text))
    except AgentError as error:
        if not as_text:
            _write_json(Uninstalled(LeftoverOutcome()), str(error))
        _say(str(error))
        return _code(error, everywhere=args.all_nodes)
    if as_text:
        _write_rest(done)
    else:
        _write_json(done, "")
    if done.outcome.is_silent:
        return UNREACHABLE
    return OK if done.outcome.complete else PROBLEM


def _say(text: str) -> None:
    sys.stderr.write(f"hami-agent uninstall: {text}\n")
    sys.stderr.flush()


def _misused(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """What is wrong with the command line; empty: nothing."""
    if {args.all_nodes} != {bool(args.namespace), bool(args.selector)}:
        return "--all-nodes, --namespace and --selector go together"
    if not args.all_nodes:
        return ""
    given = [flag for flag in flags(args) if flag not in EVERYWHERE]
    given += ["--force"] * args.force + ["--config"] * bool(args.config)
    if given:
        return f"{', '.join(sorted(given))} would have no effect with --all-nodes: leave it out"
    if not _kubeconfig(args, environ) and IN_CLUSTER not in environ:
        return "no kubeconfig, and this is no pod: give --kubeconfig, or set KUBECONFIG"
    return ""


def _kubeconfig(args: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """For all Nodes; in a pod its service account comes before KUBECONFIG."""
    named = flags(args).get("--kubeconfig")
    return named or (None if IN_CLUSTER in environ else environ.get("KUBECONFIG"))


async def _done(
    args: argparse.Namespace, environ: Mapping[str, str], *, as_text: bool
) -> Uninstalled:
    def told(one: Cleaned) -> None:
        if as_text:
            sys.stdout.writelines(_lines(one))
            sys.stdout.flush()

    if not args.all_nodes:
        start = await started(sources(args, environ))
        settings = start.taken().settings(NodeFacts())
        return await uninstall_here(settings, environ, told, _say, force=args.force)
    # A release whose settings are refused must be uninstalled, too; its Job has its variables.
    named = _kubeconfig(args, environ)
    connection = Connection(Path(named) if named else None, environment=environ)
    resource = flags(args).get("--resource-name") or RESOURCE
    agents = Agents(args.namespace, args.selector, resource)
    return await uninstall_everywhere(connection, agents, told, _say)


def _code(error: AgentError, *, everywhere: bool) -> int:
    """With --all-nodes no settings are read but how to reach the API server."""
    if everywhere and isinstance(error, SettingsError):
        return UNREACHABLE
    if isinstance(error, ApiNotFound):
        return NOT_FOUND
    if isinstance(error, InUse) or not isinstance(error, ApiError):
        return PROBLEM
    return PROBLEM if error.status else UNREACHABLE


def _lines(one: Cleaned) -> list[str]:
    lines = [f"{one.node}: removed {', '.join(one.removed)}\n"] if one.removed else []
    lines += [f"{one.node}: left {key}: {why}\n" for key, why in one.left.items()]
    lines += [f"{one.node}: something is left: {one.failure}\n"] if one.failure else []
    return lines


def _write_rest(done: Uninstalled) -> None:
    outcome = done.outcome
    if all(one.is_bare for one in outcome.nodes) and not outcome.occupied:
        sys.stdout.write("nothing of the agent's was found\n")
    for node, pod in sorted(outcome.occupied.items()):
        said = f"{node}: not touched, for an agent that does not end would write again (pod {pod})"
        sys.stdout.write(f"{said}; {BY_HAND}\n")
    if outcome.unreached:
        names = ", ".join(outcome.unreached)
        sys.stdout.write(f"not looked at, for the API server does not answer: {names}\n")
    sys.stdout.writelines(f"this host: left {path}: {why}\n" for path, why in done.host.items())


def _write_json(done: Uninstalled, refusal: str) -> None:
    document = {
        "apiVersion": API_VERSION,
        "kind": "Uninstallation",
        "ok": not refusal and done.outcome.complete,
        "refusal": refusal,
        "nodes": [
            {
                "node": one.node,
                "removed": list(one.removed),
                "left": dict(one.left),
                "failure": one.failure,
            }
            for one in done.outcome.nodes
        ],
        "notTouched": [
            {"node": node, "pod": pod} for node, pod in sorted(done.outcome.occupied.items())
        ],
        "notReached": list(done.outcome.unreached),
        "leftOnHost": dict(done.host),
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
