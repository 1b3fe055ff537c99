"""`uninstall`: removes what the agent wrote from this Node or from all Nodes."""

import contextlib
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent.core.errors import AgentError, PermissionFault
from agent.core.node.leftovers import Agents, LeftoverOutcome
from agent.host.kube.connection import Connection, check
from agent.host.kube.leftovers import KubeLeftovers
from agent.host.kube.session import KubeSession
from agent.host.lockfile import LockFile
from agent.services.leftovers import Say, Told, clean, clean_all, vacated
from agent.settings.sections import Settings

PROGRAM: Final = "hami-agent-uninstall"
"""Not the agent's name: changes made here must not count as written by an agent."""
SHOWN: Final = 3
"""Pods that a message names."""


class InUse(AgentError):  # noqa: N818 -- the state, not the call, is the error
    """The uninstall is refused. Nothing was changed."""


class Uninstalled(msgspec.Struct, frozen=True):
    """The result for the Nodes, and the paths that stay on this host, each with the reason."""

    outcome: LeftoverOutcome
    host: Mapping[str, str] = msgspec.field(default_factory=dict)


async def uninstall_here(
    settings: Settings, environ: Mapping[str, str], told: Told, say: Say, *, force: bool
) -> Uninstalled:
    """Clean the Node of this host, if nothing serves it.

    If there is a run directory, the lock in it keeps an agent from starting meanwhile. `force`:
    even if pods with GPUs run here. Raises InUse, PermissionFault, SettingsError, ApiNotFound
    (there is no such Node), ApiError.
    """
    with _without_an_agent(settings.paths.run / "lock"):
        if settings.plain is not None:  # plain mode writes nothing to a Node
            return Uninstalled(LeftoverOutcome(), _paths_left(settings))
        kubeconfig = Path(settings.kubeconfig) if settings.kubeconfig else None
        async with _opened(Connection(kubeconfig, environment=environ)) as api:
            resource = settings.sharing.resource
            node = await api.node(settings.node)
            pods = () if force else await api.gpu_pods(node.name, resource)
            if pods:
                raise InUse(_pods_run(pods))
            state = await api.look(node.name, resource)
            if node.is_touched or state.degraded:
                state = (await vacated(api, (node.name,), resource, say))[node.name]
                if state.served:
                    raise InUse(_plugin_serves(node.name, resource))
            cleaned = await clean(api, node, state, resource, here=True)
    told(cleaned)
    return Uninstalled(LeftoverOutcome((cleaned,)), _paths_left(settings))


async def uninstall_everywhere(
    connection: Connection, agents: Agents, told: Told, say: Say
) -> Uninstalled:
    """Clean all Nodes after these agents have ended. Raises SettingsError, ApiError."""
    check(connection)
    async with _opened(connection) as api:
        return Uninstalled(await clean_all(api, agents, told, say))


@contextlib.contextmanager
def _without_an_agent(path: Path) -> Iterator[None]:
    """Hold the host's lock, if there is a run directory. Raises InUse, PermissionFault."""
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
        raise InUse(
            f"an agent runs on this host ({path}: {lock.holder()}) and would write again: stop it "
            "first (`systemctl stop hami-agent`, or take the DaemonSet off this node)"
        )
    try:
        yield
    finally:
        lock.release()


def _pods_run(pods: tuple[str, ...]) -> str:
    more = f" and {len(pods) - SHOWN} more" if len(pods) > SHOWN else ""
    return (
        f"pods with GPUs run here ({', '.join(pods[:SHOWN])}{more}): they would keep running, but "
        "could not restart until another plugin serves; --force uninstalls anyway"
    )


def _plugin_serves(node: str, resource: str) -> str:
    return (
        f"a device plugin serves {resource} on the Node {node}, as its kubelet reports: an agent "
        "would write again, and another plugin's report must stay; stop that plugin first"
    )


def _paths_left(settings: Settings) -> Mapping[str, str]:
    """The agent's paths that stay on this host, each with what to do about it."""
    paths = settings.paths
    reasons = {
        paths.state: "the state, for a later install; remove it if none will follow",
        paths.run: "the next boot removes it; or remove it now",
        paths.hook / "vgpu": "mounted in containers with GPUs; remove it when they have ended",
    }
    present = {path: _reason_left(path, why) for path, why in reasons.items()}
    return {str(path): why for path, why in present.items() if why}


def _reason_left(path: Path, why: str) -> str:
    """The reason why the path stays; empty if it does not exist."""
    try:
        return why if path.is_dir() else ""
    except OSError as error:
        return f"it may exist: it cannot be accessed ({error.strerror})"


@contextlib.asynccontextmanager
async def _opened(connection: Connection) -> AsyncIterator[KubeLeftovers]:
    session = KubeSession(connection, random.SystemRandom(), PROGRAM)
    try:
        yield KubeLeftovers(session)
    finally:
        await session.close()
