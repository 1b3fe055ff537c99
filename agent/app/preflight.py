"""`doctor --pre`: checks everything that the agent needs on this node, and changes nothing."""

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path

import msgspec

import agent
from agent.app.adapters import open_driver
from agent.codec.node_report import register_differences, report_of
from agent.core.cluster.annotations import REGISTER
from agent.core.cluster.pods import NodeView
from agent.core.containers.edits import HookFacts
from agent.core.errors import (
    AgentError,
    ApiError,
    DriverMissing,
    KubeletError,
    SettingsError,
    StateError,
    WitnessUnsupported,
)
from agent.core.inventory.gpu import Scan, Trouble
from agent.core.inventory.inventory import Inventory
from agent.core.node import api_rights, preflight
from agent.core.node.findings import Finding
from agent.core.node.preflight import ClusterAnswer
from agent.core.state.holdings import Holding
from agent.host.clock import SystemClock
from agent.host.hook.directories import HostHookDirs
from agent.host.inspection import uncompiled
from agent.host.kube.api import KubeNode
from agent.host.kube.connection import Connection
from agent.host.kube.review import KubeReview
from agent.host.kube.session import KubeSession
from agent.host.podresources import PodResourcesWitness
from agent.host.surroundings import look_at, plugin_sockets
from agent.host.worker import Worker
from agent.kit.cell import Cell
from agent.services.inventory.service import InventoryKeeper
from agent.settings.sections import Settings

DRIVER_SECONDS = 15.0
"""8 GPUs that initialise one after the other take 12 s."""
LOOK_SECONDS = 1.0
NODE_SECONDS = 5.0
"""A Node that exists comes with the first frame of its watch."""


async def examine(
    settings: Settings, environ: Mapping[str, str], *, reader: bool = False
) -> tuple[Finding, ...]:
    """All checks except those of the settings, each with a deadline of its own.

    `reader`: the account may only read, and is not the agent's.
    """
    plain = settings.plain is not None
    cluster = None if plain else await _cluster(settings, environ, reader=reader)
    scan, driver = await driver_findings(settings)
    library, _ = await library_finding(settings)
    findings = [*path_findings(settings), bytecode_finding(), library, *driver]
    plugins, socket = settings.paths.plugins, settings.paths.kubelet_socket
    place = look_at(plugins)
    findings.append(preflight.judge_kubelet(place, look_at(socket)))
    findings.append(await witness_finding(settings))
    if cluster is not None:
        findings += preflight.judge_cluster(settings.node, cluster)
    sockets = plugin_sockets(plugins, socket.name)
    findings += preflight.judge_plugins(place, sockets, cluster, takeover=settings.takeover)
    if cluster is not None and REGISTER in cluster.annotations and scan is not None:
        differences = report_differences(settings, scan, cluster.annotations)
        findings.append(preflight.judge_report(settings.node, differences))
    return tuple(findings)


def report_differences(
    settings: Settings, scan: Scan, annotations: Mapping[str, str]
) -> tuple[str, ...]:
    """Where the Node's register annotation differs from what the agent would write.

    A GPU that the driver does not describe now is left out: an agent that runs goes on naming it.
    """
    inventory = Cell(Inventory())
    InventoryKeeper(inventory, Cell(settings.sharing), SystemClock()).found(scan)
    report = report_of(inventory.value, annotations, settings.report)
    if report is None:
        return ()
    faulty = frozenset(fault.gpu for fault in scan.faults)
    return register_differences(report, annotations[REGISTER], faulty)


def path_findings(settings: Settings) -> list[Finding]:
    """Judge the directories that the agent writes to."""
    paths = settings.paths
    made = [preflight.judge_path(look_at(path), made=True) for path in (paths.state, paths.run)]
    hook, home = look_at(paths.hook), look_at(paths.hook / "vgpu")
    if home.kind:  # a pod mounts only this directory, and its root is read-only
        hook = msgspec.structs.replace(hook, writable=home.writable)
    return [*made, preflight.judge_path(hook, made=False)]


def bytecode_finding() -> Finding:
    """Judge whether this program, as far as it is loaded, was compiled when it was installed."""
    modules = list(sys.modules.values())
    return preflight.judge_bytecode(str(Path(agent.__file__).parent), uncompiled(modules))


async def library_finding(settings: Settings) -> tuple[Finding, HookFacts | None]:
    """Judge whether HAMi-core's files exist; also return what was seen of them."""
    plain = settings.plain
    home = str(settings.paths.hook / "vgpu")
    facts: HookFacts | None = None
    async with Worker("disk", 1) as worker:
        version = settings.library_version
        hooks = HostHookDirs(settings.paths.hook, Path("/dev"), version, worker, worker)
        try:
            facts = await hooks.facts()
            missing = facts.missing
        except (StateError, OSError) as error:
            missing = (str(error),)
    needed = plain is None or plain.memory_limits
    return preflight.judge_library(home, missing, needed=needed), facts


async def driver_findings(settings: Settings) -> tuple[Scan | None, tuple[Finding, ...]]:
    """Scan within 15 s; return the last scan, None if there is none, and judge it."""
    library = settings.driver.nvml_library or "NVIDIA's library (NVML)"
    scan, failure, remedy = await last_scan(_scans(settings))
    name = settings.driver.simulate or library
    return scan, tuple(preflight.judge_driver(name, scan, failure, remedy))


async def last_scan(scans: AsyncGenerator[Scan]) -> tuple[Scan | None, str, str | None]:
    """The first scan in which no GPU is waking, else the last in time; the failure; the remedy.

    No failure: the empty string. The remedy is None if the failure names none.
    """
    scan: Scan | None = None
    failure, remedy = "", None
    try:
        async with asyncio.timeout(DRIVER_SECONDS), contextlib.aclosing(scans):
            async for scan in scans:
                if all(fault.trouble is not Trouble.SILENT for fault in scan.faults):
                    break
    except TimeoutError:
        failure = f"the driver did not answer within {DRIVER_SECONDS:g} s"
    except (AgentError, OSError) as error:
        failure, remedy = failure_of(error)
    return scan, failure, remedy


def failure_of(error: AgentError | OSError) -> tuple[str, str | None]:
    """The failure and the remedy. Empty remedy: the failure contains it. None: it is not known.

    The text form prints both in one line; scripts read them separately.
    """
    if isinstance(error, DriverMissing | SettingsError):
        return error.said, error.remedy
    return str(error), None


async def _scans(settings: Settings) -> AsyncGenerator[Scan]:
    """Scan again and again: GPUs that initialise take seconds to answer.

    Simulated GPUs are scanned once, without the socket that `run` opens for them. Raises
    DriverMissing, DriverError, SettingsError.
    """
    spec = settings.driver.simulate
    if spec is not None:
        from agent.sandbox.driver import look_once  # noqa: PLC0415 -- only the driver in use

        yield await look_once(spec)
        return
    async with open_driver(settings) as driver:
        while True:
            yield await driver.scan()
            await asyncio.sleep(LOOK_SECONDS)


async def witness_finding(settings: Settings, *, serving: bool = False) -> Finding:
    """Ask PodResources, and judge its answers. `serving`: an agent runs here."""
    path = settings.paths.pod_resources_socket
    witness = PodResourcesWitness(path)
    held: int | None = None
    failure = ""
    asks = True
    try:
        held = _held(await witness.list(), settings.sharing.resource)
        await witness.get("default", "hami-agent-doctor")
    except WitnessUnsupported:
        asks = False
    except KubeletError as error:
        failure = str(error)
    finally:
        witness.close()
    return preflight.judge_witness(str(path), held, failure, asks=asks, serving=serving)


def _held(pods: tuple[Holding, ...], resource: str) -> int:
    return sum(1 for pod in pods for held in pod.containers if held.ids.get(resource))


async def _cluster(
    settings: Settings, environ: Mapping[str, str], *, reader: bool
) -> ClusterAnswer:
    connection, server = connection_of(settings, environ)
    try:
        async with open_session(connection) as session:
            return await ask_cluster(session, settings, server, reader=reader)
    except (ApiError, SettingsError) as error:
        failure, remedy = failure_of(error)
        return ClusterAnswer(server, failure=failure, remedy=remedy)


def connection_of(settings: Settings, environ: Mapping[str, str]) -> tuple[Connection, str]:
    """The connection to the API server, and its name in messages."""
    kubeconfig = Path(settings.kubeconfig) if settings.kubeconfig else None
    connection = Connection(kubeconfig=kubeconfig, environment=environ)
    return connection, f"API server by {connection.source}"


async def ask_cluster(
    session: KubeSession, settings: Settings, server: str, *, reader: bool
) -> ClusterAnswer:
    """Ask for the rights of this account, the plugins on this node and the Node.

    Raises ApiError, SettingsError. `reader`: as for examine().
    """
    review = KubeReview(session, settings.node)
    wanted = api_rights.rights(settings.node, node_condition=settings.node_condition)
    unasked = tuple(right for right in wanted if reader and not right.reads)
    asked = [right for right in wanted if right not in unasked]
    denied = tuple([right for right in asked if not await review.granted(right)])
    if denied:  # the next requests would fail for the same reason
        return ClusterAnswer(server, denied=denied)
    neighbours = await review.neighbours()
    looks = [api_rights.right_to_get(pod) for pod in neighbours.pods[:1]]
    denied = tuple([right for right in looks if not await review.granted(right)])
    if denied:
        return ClusterAnswer(server, denied=denied)
    node = await _node(KubeNode(session, settings.node))
    plugins = neighbours.plugins
    if node is None:
        return ClusterAnswer(server, found=False, unasked=unasked, plugins=plugins)
    return ClusterAnswer(
        server, True, node.labels, node.annotations, unasked=unasked, plugins=plugins
    )


@contextlib.asynccontextmanager
async def open_session(connection: Connection) -> AsyncIterator[KubeSession]:
    """Open a session, and close it at the end. Raises SettingsError."""
    session = KubeSession(connection, random.SystemRandom())
    try:
        await session.open()
        yield session
    finally:
        await session.close()


async def _node(api: KubeNode) -> NodeView | None:
    """This Node as the watch first shows it; None if it shows none."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(NODE_SECONDS):
            async for change in api.watch_node():
                if not change.opened:
                    return change.node
    return None
