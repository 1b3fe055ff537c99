"""`uninstall`: removes what the agent wrote from this Node or from all Nodes.

A device plugin that serves a Node, as its kubelet reports, keeps everything there. Not detected is
one that is just restarting, whose GPUs are all unhealthy, or of another resource: it writes its
report again.
"""

import asyncio
import contextlib
import functools
import random
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from agent.core.errors import AgentError, ApiError, ApiNotFound, PermissionFault, StateError
from agent.core.health.news import GPU_DEGRADED
from agent.core.usage.region import RegionChange
from agent.host.hook.regions import HostRegions
from agent.host.kube.connection import Connection, check
from agent.host.kube.leftovers import KubeLeftovers, NodeLeftovers
from agent.host.kube.session import KubeSession
from agent.host.lockfile import LockFile
from agent.host.worker import Worker
from agent.settings.sections import Settings

RESOURCE: Final = "nvidia.com/gpu"
"""The resource that agents serve by default."""
PATIENCE: Final = 90.0
"""Seconds for the agents' pods to end."""
VACATING: Final = 30.0
"""Seconds for the kubelets to report that no plugin serves; they report every 10 s."""
PAUSE: Final = 2.0
SHOWN: Final = 3
"""The most names in a sentence."""

C = TypeVar("C", bound=Collection[str])


class InUse(AgentError):  # noqa: N818 -- the state, not the call, is the error
    """The uninstall is refused. Nothing of the Node was changed."""


class Cleaned(msgspec.Struct, frozen=True):
    """The result for one Node: what was removed, or why it was left, or why something stays."""

    node: str
    removed: tuple[str, ...] = ()
    skipped: str = ""
    failure: str = ""


class Uninstalled(msgspec.Struct, frozen=True):
    """The result for the Nodes, and the paths that stay on this host, each with the reason."""

    nodes: tuple[Cleaned, ...] = ()
    host: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Nothing of an agent's is left on any Node."""
        return not any(node.failure for node in self.nodes)


Told = Callable[[Cleaned], None]
Say = Callable[[str], None]
"""Takes a progress line."""


async def uninstall_here(
    settings: Settings, environ: Mapping[str, str], told: Told, say: Say, *, force: bool
) -> Uninstalled:
    """Clean the Node of this host, if no pod has a GPU and no plugin serves; or by `force`.

    If there is a run directory, the lock in it keeps an agent from starting meanwhile. Raises
    InUse, PermissionFault, SettingsError, ApiNotFound (there is no such Node), ApiError.
    """
    with _without_an_agent(settings.paths.run / "lock"):
        await _release(settings.paths.hook, say)
        if settings.plain is not None:  # plain mode writes nothing to a Node
            return Uninstalled(host=_paths_left(settings))
        kubeconfig = Path(settings.kubeconfig) if settings.kubeconfig else None
        connection = Connection(kubeconfig, environment=environ)
        async with _opened(connection, settings.sharing.resource) as api:
            node = await api.node(settings.node)
            if node.is_touched and not force:
                if pods := await api.gpu_pods(node.name):
                    raise InUse(
                        f"pods with GPUs run here ({_some(pods)}): they would keep running, but "
                        "could not restart until another plugin serves; --force uninstalls anyway"
                    )
                await _vacated(api, [node], say)
                node = await api.node(node.name)
                if node.served:
                    raise InUse(
                        f"a device plugin serves {settings.sharing.resource} on the Node "
                        f"{node.name}, as its kubelet reports, and would write again: stop it "
                        "first; --force uninstalls anyway"
                    )
            await api.clean(node)
    cleaned = Cleaned(node.name, _names(node))
    told(cleaned)
    return Uninstalled((cleaned,), _paths_left(settings))


async def uninstall_everywhere(
    connection: Connection, resource: str, namespace: str, selector: str, told: Told, say: Say
) -> Uninstalled:
    """Wait for the agents' pods to end, then clean every Node on which no plugin serves.

    A pod that does not end keeps only its own Node from being cleaned, if a kubelet runs it there.
    Raises SettingsError, ApiError: the pods or the Nodes cannot be read.
    """
    check(connection)
    async with _opened(connection, resource) as api:
        listed = functools.partial(api.agents, namespace, selector)
        pods = await _wait(PATIENCE, "the agents' pods to end", listed, say)
        agents = {node: pod for pod, node in pods.items()}
        done: list[Cleaned] = []
        rest: list[NodeLeftovers] = []
        for node in await api.nodes():
            if node.name in agents and node.has_kubelet:  # without one nothing runs the pod
                failure = (
                    f"its agent has not ended and would write again (pod {agents[node.name]}): "
                    "clean it by hand when the pod is gone: deploy/README.md, Uninstall"
                )
                done.append(Cleaned(node.name, failure=failure))
                told(done[-1])
            elif node.is_touched:
                rest.append(node)
        await _vacated(api, rest, say)
        for node in rest:
            try:
                done.append(await _cleaned(api, node.name, resource))
            except ApiNotFound:
                continue
            except ApiError as error:
                if not error.status:  # each of the others would wait for the API server
                    raise
                done.append(Cleaned(node.name, failure=str(error)))
            told(done[-1])
    return Uninstalled(tuple(done))


async def _cleaned(api: KubeLeftovers, name: str, resource: str) -> Cleaned:
    """Clean a Node as it is now: a plugin may serve since the wait began. Raises ApiError."""
    node = await api.node(name)
    if node.served:
        return Cleaned(name, skipped=f"a device plugin serves {resource} there")
    await api.clean(node)
    return Cleaned(name, _names(node))


async def _vacated(api: KubeLeftovers, nodes: Iterable[NodeLeftovers], say: Say) -> None:
    """Wait until no plugin serves on these Nodes, at most VACATING seconds. Raises ApiError."""
    rest = [node.name for node in nodes if node.served]

    async def serving() -> list[str]:
        for name in tuple(rest):
            with contextlib.suppress(ApiNotFound):
                if (await api.node(name)).served:
                    continue
            rest.remove(name)
        return rest

    await _wait(VACATING, "the kubelets to report that no plugin serves", serving, say)


async def _wait(seconds: float, what: str, ask: Callable[[], Awaitable[C]], say: Say) -> C:
    """What `ask` names, once that is nothing or after these seconds. Raises ApiError."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    names = await ask()
    if names:
        say(f"waiting up to {seconds:.0f} s for {what}: {_some(names)}")
    while names and loop.time() < ends:
        await asyncio.sleep(PAUSE)
        names = await ask()
    return names


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


def _names(node: NodeLeftovers) -> tuple[str, ...]:
    """What `KubeLeftovers.clean` removes from the Node."""
    return (*node.keys, *((f"condition {GPU_DEGRADED}",) if node.degraded else ()))


def _some(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return ", ".join(known[:SHOWN]) + more


@contextlib.asynccontextmanager
async def _opened(connection: Connection, resource: str) -> AsyncIterator[KubeLeftovers]:
    session = KubeSession(connection, random.SystemRandom(), "hami-agent-uninstall")
    try:
        yield KubeLeftovers(session, resource)
    finally:
        await session.close()
