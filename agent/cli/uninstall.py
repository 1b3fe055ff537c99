"""Removes the GPU report and the agent's condition from the Node of this host.

It refuses while pods with GPUs or an agent run here, or a device plugin serves after 90 s. It
releases containers that a killed agent held back, and changes nothing else on the host and no pod;
a second call does nothing. Exits 1 if it refused or something of an agent is left, 3 without the
API server, 4 without the Node.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent.cli.connections import IN_CLUSTER, open_session
from agent.cli.main import OK, PROBLEM, TABLE, USAGE, Subparsers, add_output, code_of, fail
from agent.cli.output import answer
from agent.cli.settings_args import add_settings, flags, sources, started
from agent.errors import (
    AgentError,
    ApiError,
    ApiNotFound,
    SettingsError,
    StateError,
)
from agent.hami.region import RegionChange
from agent.host.files import Worker
from agent.host.process import LockFile
from agent.kit.logs import configure
from agent.kube.connection import Connection
from agent.kube.reader import KubeLeftovers, NodeLeftovers
from agent.regions import HostRegions
from agent.settings.sources import NodeFacts

PROGRAM: Final = "hami-agent-uninstall"
"""The field manager of what is removed."""

RESOURCE: Final = "nvidia.com/gpu"
"""The resource that agents serve by default."""

WAIT: Final = 90.0
"""Seconds for the agents to end, within the grace period of their pods (15 s), and for the
kubelets to report that no plugin serves, which they do every 10 s."""

PAUSE: Final = 5.0
"""Seconds between two looks at the Nodes."""

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
"""Tells of one Node as soon as it is done."""

Look = Callable[[], Awaitable[tuple[NodeLeftovers, ...]]]
"""Reads the Nodes anew."""


async def clean_nodes(
    api: KubeLeftovers, look: Look, resource: str, told: Told, *, force: bool = False
) -> None:
    """Clean each Node when neither agent nor plugin is on it; at the end, say why others are left.

    It looks until all are free or WAIT has passed, and cleans again what was written meanwhile.
    With `force` it looks once and cleans all. A plugin is there if the kubelet offers its
    resource. So one is not seen that is just restarting, whose GPUs are all unhealthy, or that has
    another resource: it writes its report again.

    Raises:
        ApiError: the API server does not answer.
    """
    clock, failed, is_said = asyncio.get_running_loop().time, set[str](), False
    ends = clock() + WAIT

    while True:
        nodes = await look()
        for node in nodes:
            is_kept = not force and (node.is_busy or node.served)
            if is_kept or not node.is_touched or node.name in failed:
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

        busy = [node.name for node in nodes if node.is_busy]
        if force or not busy or clock() >= ends:
            break

        if not is_said:
            _say(
                f"waiting up to {WAIT:.0f} s for the agents to end and the kubelets to report that "
                f"no plugin serves: {_some(busy)}"
            )
            is_said = True

        await asyncio.sleep(PAUSE)

    for node in nodes if not force else ():
        if node.agent and node.has_kubelet:  # without a kubelet nothing runs the pod
            failure = (
                f"its agent has not ended and would write again (pod {node.agent}): "
                "clean it by hand when the pod is gone: deploy/README.md, Uninstall"
            )
            told(Cleaned(node.name, failure=failure))
        elif node.served and node.is_touched:
            told(Cleaned(node.name, skipped=f"a device plugin serves {resource} there"))


async def uninstall_here(args: argparse.Namespace, environ: Mapping[str, str], told: Told) -> None:
    """Clean the Node of this host, if no pod has a GPU and no plugin serves; or by --force.

    If there is a run directory, the lock in it keeps an agent from starting meanwhile. Raises
    UninstallRefused, PermissionFault, SettingsError, ApiNotFound (there is no such Node), ApiError.
    """
    try:
        settings = (await started(sources(args, environ))).taken().settings(NodeFacts())
    except SettingsError as error:
        raise UninstallRefused(str(error)) from error

    resource = settings.sharing.resource

    def tell(done: Cleaned) -> None:
        if done.skipped:
            raise UninstallRefused(
                f"a device plugin serves {resource} on the Node {done.node}, as its kubelet "
                "reports, and would write again: stop it first; --force uninstalls anyway"
            )

        if done.failure:
            raise UninstallRefused(done.failure)

        told(done)

    with _without_an_agent(settings.paths.run / "lock"):
        await _release(settings.hook_path)
        if settings.plain is not None:  # plain mode writes nothing to a Node
            return

        kubeconfig = Path(settings.kubeconfig) if settings.kubeconfig else None
        connection = Connection(kubeconfig, environment=environ)
        async with open_session(connection, PROGRAM) as session:
            api = KubeLeftovers(session, resource)

            async def look() -> tuple[NodeLeftovers, ...]:
                return (await api.node(settings.node),)

            (node,) = await look()
            if not node.is_touched:
                told(Cleaned(node.name))
            elif not args.force and (pods := await api.gpu_pods(node.name)):
                raise UninstallRefused(
                    f"pods with GPUs run here ({_some(pods)}): they would keep running, but "
                    "could not restart until another plugin serves; --force uninstalls anyway"
                )

            # The agent has just ended, so its kubelet may still report that it serves.
            await clean_nodes(api, look, resource, tell, force=args.force)


async def uninstall_everywhere(
    connection: Connection, resource: str, namespace: str, selector: str, told: Told
) -> None:
    """Clean every Node on which no agent and no plugin is left, also where pods have GPUs.

    Raises SettingsError, ApiError: the pods or the Nodes cannot be read.
    """
    async with open_session(connection, PROGRAM) as session:
        api = KubeLeftovers(session, resource)
        await clean_nodes(api, lambda: api.nodes(namespace, selector), resource, told)


async def _release(hook: Path) -> None:
    """Release the containers that an agent held back which was killed: no other will."""
    if not _may_exist(hook):
        return

    try:
        async with Worker("regions") as worker:
            regions = HostRegions(hook, worker)
            held = await regions.held()
            failed = await regions.write({name: RegionChange(recent_kernel=0) for name in held})
    except StateError as error:
        _say(f"containers that an agent held back may wait for ever: {error}")
        return

    for name in held:
        _say(f"{name}: launches were held back; {failed.get(name, 'released')}")


@contextlib.contextmanager
def _without_an_agent(path: Path) -> Iterator[None]:
    """Hold the host's lock, if there is a run directory.

    Raises UninstallRefused, PermissionFault.
    """
    lock = LockFile(path)
    if _may_exist(path.parent) and not lock.try_take():
        raise UninstallRefused(
            f"an agent runs on this host ({path}: {lock.holder()}) and would write again: stop it "
            "first (`systemctl stop hami-agent`, or take the DaemonSet off this node)"
        )

    try:
        yield
    finally:
        lock.release()


def _may_exist(path: Path) -> bool:
    """Whether the path exists; also if that cannot be told, which its use will report."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True

    return True


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
        description=__doc__,
        epilog="example: hami-agent uninstall --node-name gpu-1 -o json",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="even if pods with GPUs run here or a device plugin serves; not beside an agent",
    )
    add_output(parser)

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

    add_settings(parser, only=OF_USE)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the verb, print a line for each change, and return the exit code."""
    configure("error", "auto", environ)
    named = flags(args).get("--kubeconfig")
    if args.all_nodes and not named and IN_CLUSTER not in environ:
        named = environ.get("KUBECONFIG")  # in a pod its service account comes before it

    if mistake := _misused(args, is_reachable=bool(named) or IN_CLUSTER in environ):
        return fail("uninstall", mistake, USAGE)

    done: list[Cleaned] = []

    def told(node: Cleaned) -> None:
        done.append(node)
        said = f"removed {', '.join(node.removed)}"
        said = f"skipped: {node.skipped}" if node.skipped else said
        said = f"something is left: {node.failure}" if node.failure else said

        if args.output == TABLE and node != Cleaned(node.node):
            sys.stdout.write(f"{node.node}: {said}\n")
            sys.stdout.flush()

    if args.all_nodes:
        # No settings are read: a release with invalid settings must be uninstallable. Its Job has
        # the variables of the release.
        connection = Connection(Path(named) if named else None, environment=environ)
        resource = flags(args).get("--resource-name") or RESOURCE
        work = uninstall_everywhere(connection, resource, args.namespace, args.selector, told)
    else:
        work = uninstall_here(args, environ, told)

    refusal = ""
    try:
        asyncio.run(work)
        code = PROBLEM if any(node.failure for node in done) else OK
    except AgentError as error:
        refusal, code = str(error), code_of(error)

    is_clean = not refusal and all(node == Cleaned(node.node) for node in done)
    data = {"ok": code == OK, "refusal": refusal, "nodes": done}
    answer(args.output, "Uninstallation", data, ["nothing of the agent's was found"] * is_clean)

    return fail("uninstall", refusal, code) if refusal else code


def _say(text: str) -> None:
    sys.stderr.write(f"hami-agent uninstall: {text}\n")


def _misused(args: argparse.Namespace, *, is_reachable: bool) -> str:
    if {args.all_nodes} != {bool(args.namespace), bool(args.selector)}:
        return "--all-nodes, --namespace and --selector go together"

    given = [flag for flag in flags(args) if flag not in EVERYWHERE]
    given += ["--force"] * args.force + ["--config"] * bool(args.config)
    if args.all_nodes and given:
        return f"{', '.join(sorted(given))} would have no effect with --all-nodes: leave it out"

    if args.all_nodes and not is_reachable:
        return "no kubeconfig, and this is not a pod: give --kubeconfig, or set KUBECONFIG"

    return ""
