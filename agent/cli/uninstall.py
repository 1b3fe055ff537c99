"""`hami-agent uninstall`: removes what the agent wrote on its Node, after the agent stopped."""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent.cli.connections import IN_CLUSTER, open_session
from agent.cli.logs import configure
from agent.cli.main import OK, PROBLEM, TABLE, USAGE, Subparsers, add_output, code_of, fail
from agent.cli.output import answer
from agent.cli.settings_args import add_settings, flags, sources, started
from agent.errors import (
    AgentError,
    ApiError,
    ApiNotFound,
    PermissionFault,
    SettingsError,
    StateError,
)
from agent.hami.region import RegionChange
from agent.host.process import LockFile, Worker
from agent.kube.client import Connection
from agent.kube.reader import KubeLeftovers, NodeLeftovers
from agent.regions import HostRegions
from agent.settings.schema import Settings
from agent.settings.sources import NodeFacts

# `uninstall`: removes what the agent wrote from this Node or from all Nodes.
#
# A device plugin that serves a Node, as its kubelet reports, keeps everything there. Not detected
# is one that is just restarting, whose GPUs are all unhealthy, or of another resource: it writes
# its report again.

PROGRAM: Final = "hami-agent-uninstall"
RESOURCE: Final = "nvidia.com/gpu"
"""The resource that agents serve by default."""
WAIT: Final = 90.0
"""Seconds for the agents to end, within the grace period of their pods (15 s), and for the
kubelets to report that no plugin serves, which they do every 10 s."""
PAUSE: Final = 5.0
SHOWN: Final = 3
"""The most names in a sentence."""


class UninstallRefused(AgentError):  # noqa: N818 -- names what happened
    """The uninstall is refused. Nothing of the Node was changed."""


class Cleaned(msgspec.Struct, frozen=True):
    """The result for one Node: what was removed, or why it was left, or why something stays."""

    node: str
    removed: tuple[str, ...] = ()
    skipped: str = ""
    failure: str = ""


Told = Callable[[Cleaned], None]
Say = Callable[[str], None]
"""Takes a progress line."""


async def uninstall_here(
    settings: Settings, environ: Mapping[str, str], told: Told, say: Say, *, force: bool
) -> None:
    """Clean the Node of this host, if no pod has a GPU and no plugin serves; or by `force`.

    If there is a run directory, the lock in it keeps an agent from starting meanwhile. Raises
    UninstallRefused, PermissionFault, SettingsError, ApiNotFound (there is no such Node), ApiError.
    """
    with _without_an_agent(settings.paths.run / "lock"):
        await _release(settings.hook_path, say)
        if settings.plain is not None:  # plain mode writes nothing to a Node
            return
        kubeconfig = Path(settings.kubeconfig) if settings.kubeconfig else None
        connection = Connection(kubeconfig, environment=environ)
        async with open_session(connection, PROGRAM) as session:
            api = KubeLeftovers(session, settings.sharing.resource)
            node = await api.node(settings.node)
            if node.is_touched and not force:
                if pods := await api.gpu_pods(node.name):
                    raise UninstallRefused(
                        f"pods with GPUs run here ({_some(pods)}): they would keep running, but "
                        "could not restart until another plugin serves; --force uninstalls anyway"
                    )

                async def seen() -> tuple[NodeLeftovers, ...]:
                    return (await api.node(settings.node),)

                # The agent has just ended, so its kubelet may still report that it serves.
                async for (node,) in _looks(seen, say):  # noqa: B007 -- the last look counts
                    pass
                if node.served:
                    raise UninstallRefused(
                        f"a device plugin serves {settings.sharing.resource} on the Node "
                        f"{node.name}, as its kubelet reports, and would write again: stop it "
                        "first; --force uninstalls anyway"
                    )
            await api.clean(node)
    told(Cleaned(node.name, node.names))


async def uninstall_everywhere(
    connection: Connection, resource: str, namespace: str, selector: str, told: Told, say: Say
) -> None:
    """Clean every Node on which no agent and no plugin is left, also where pods have GPUs.

    Each is cleaned as soon as it is free, and again if an agent wrote meanwhile. Raises
    SettingsError, ApiError: the pods or the Nodes cannot be read.
    """
    nodes: tuple[NodeLeftovers, ...] = ()
    failed: set[str] = set()
    async with open_session(connection, PROGRAM) as session:
        api = KubeLeftovers(session, resource)
        async for nodes in _looks(lambda: api.nodes(namespace, selector), say):
            for node in nodes:
                is_free = node.is_touched and not (node.is_busy or node.served)
                if not is_free or node.name in failed:
                    continue
                try:
                    await api.clean(node)
                except ApiNotFound:  # it was deleted meanwhile
                    continue
                except ApiError as error:
                    if not error.status:  # each of the others would wait for the API server
                        raise
                    failed.add(node.name)
                    told(Cleaned(node.name, failure=str(error)))
                else:
                    told(Cleaned(node.name, node.names))
    for node in nodes:
        if node.agent and node.has_kubelet:  # without a kubelet nothing runs the pod
            failure = (
                f"its agent has not ended and would write again (pod {node.agent}): "
                "clean it by hand when the pod is gone: deploy/README.md, Uninstall"
            )
            told(Cleaned(node.name, failure=failure))
        elif node.served and node.is_touched:
            told(Cleaned(node.name, skipped=f"a device plugin serves {resource} there"))


async def _looks(
    read: Callable[[], Awaitable[tuple[NodeLeftovers, ...]]], say: Say
) -> AsyncIterator[tuple[NodeLeftovers, ...]]:
    """The Nodes, again and again until neither agent nor plugin is on one, or WAIT has passed."""
    ends = asyncio.get_running_loop().time() + WAIT
    is_said = False
    while True:
        yield (nodes := await read())
        busy = [node.name for node in nodes if node.is_busy]
        if not busy or asyncio.get_running_loop().time() >= ends:
            return
        if not is_said:
            say(
                f"waiting up to {WAIT:.0f} s for the agents to end and the kubelets to report that "
                f"no plugin serves: {_some(busy)}"
            )
            is_said = True
        await asyncio.sleep(PAUSE)


async def _release(hook: Path, say: Say) -> None:
    """Release the containers that an agent held back which was killed: no other will."""
    if not _reason_left(hook, "it is there"):
        return
    try:
        async with Worker("regions", 1) as worker:
            regions = HostRegions(hook, worker)
            held = await regions.held()
            failed = await regions.write({name: RegionChange(recent_kernel=0) for name in held})
    except StateError as error:
        say(f"containers that an agent held back may wait for ever: {error}")
        return
    for name in held:
        say(f"{name}: launches were held back; {failed.get(name, 'released')}")


@contextlib.contextmanager
def _without_an_agent(path: Path) -> Iterator[None]:
    """Hold the host's lock, if there is a run directory.

    Raises UninstallRefused, PermissionFault.
    """
    try:
        is_there = path.parent.is_dir()
    except OSError as error:
        raise PermissionFault(
            f"{path.parent} cannot be accessed ({error.strerror}), so an agent may run on this "
            "host: run this command as root, or as the agent's user"
        ) from error
    if not is_there:
        yield
        return
    lock = LockFile(path)
    if not lock.try_take():
        raise UninstallRefused(
            f"an agent runs on this host ({path}: {lock.holder()}) and would write again: stop it "
            "first (`systemctl stop hami-agent`, or take the DaemonSet off this node)"
        )
    try:
        yield
    finally:
        lock.release()


def _paths_left(settings: Settings) -> Mapping[str, str]:
    """The agent's paths that stay on this host, each with what to do about it."""
    paths = settings.paths
    reasons = {
        paths.state: "the state, for a later install; remove it if none will follow",
        paths.run: "the next boot removes it; or remove it now",
        settings.hook_path
        / "vgpu": "mounted in containers with GPUs; remove it when they have ended",
    }
    left = {path: _reason_left(path, why) for path, why in reasons.items()}
    return {str(path): why for path, why in left.items() if why}


def _reason_left(path: Path, why: str) -> str:
    """The reason why the path stays; empty if it does not exist."""
    try:
        return why if path.is_dir() else ""
    except OSError as error:
        return f"it may exist: it cannot be accessed ({error.strerror})"


def _some(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return ", ".join(known[:SHOWN]) + more


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
        "after 90 s. It releases containers that a killed agent held back, and changes nothing "
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
        help="clean all Nodes; it waits up to 90 s for agents that still serve",
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
        return fail("uninstall", mistake, USAGE)
    nodes: list[Cleaned] = []

    def told(node: Cleaned) -> None:
        nodes.append(node)
        if args.output == TABLE:
            sys.stdout.writelines(_lines(node))
            sys.stdout.flush()

    refusal, code = "", OK
    host: Mapping[str, str] = {}
    try:
        host = asyncio.run(_uninstall(args, environ, told))
    except AgentError as error:
        refusal, code = str(error), code_of(error)
    else:
        code = PROBLEM if any(node.failure for node in nodes) else OK
    lines = [f"this host: left {path}: {why}" for path, why in host.items()]
    if not any(_lines(node) for node in nodes):
        lines.insert(0, "nothing of the agent's was found")
    data = {"ok": code == OK, "refusal": refusal, "nodes": nodes, "leftOnHost": dict(host)}
    answer(args.output, "Uninstallation", data, () if refusal else lines)
    return fail("uninstall", refusal, code) if refusal else code


def _say(text: str) -> None:
    sys.stderr.write(f"hami-agent uninstall: {text}\n")


def _lines(node: Cleaned) -> list[str]:
    lines = [f"{node.node}: removed {', '.join(node.removed)}\n"] if node.removed else []
    lines += [f"{node.node}: skipped: {node.skipped}\n"] if node.skipped else []
    lines += [f"{node.node}: something is left: {node.failure}\n"] if node.failure else []
    return lines


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


async def _uninstall(
    args: argparse.Namespace, environ: Mapping[str, str], told: Told
) -> Mapping[str, str]:
    """Clean this Node or all; the paths that stay on this host. Raises AgentError."""
    if args.all_nodes:
        # No settings are read: a release with invalid settings must be uninstallable. Its Job has
        # the variables of the release.
        named = _kubeconfig(args, environ)
        connection = Connection(Path(named) if named else None, environment=environ)
        resource = flags(args).get("--resource-name") or RESOURCE
        await uninstall_everywhere(connection, resource, args.namespace, args.selector, told, _say)
        return {}
    try:
        settings = (await started(sources(args, environ))).taken().settings(NodeFacts())
    except SettingsError as error:
        raise UninstallRefused(str(error)) from error
    await uninstall_here(settings, environ, told, _say, force=args.force)
    return _paths_left(settings)
