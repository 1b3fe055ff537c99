"""`doctor --pre`: checks everything that the agent needs on this node, and changes nothing."""

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path

import msgspec

import agent
from agent.allocate.edits import looks_up_cdi
from agent.app.adapters import cdi_directories, open_driver
from agent.cluster import REGISTER, NodeView
from agent.errors import (
    AgentError,
    ApiError,
    DriverMissing,
    KubeletError,
    SettingsError,
    StateError,
    WitnessUnsupported,
)
from agent.hami.register import register_differences, report_of
from agent.hookdirs import HostHookDirs
from agent.host.node import library_file, look_at, plugin_sockets, uncompiled
from agent.host.process import SystemClock, Worker
from agent.inventory import InventoryKeeper
from agent.kit.cell import Cell
from agent.kube.api import KubeNode
from agent.kube.client import Connection, KubeSession
from agent.kube.reader import NodeReader
from agent.model import Inventory, Scan, Trouble
from agent.node import preflight
from agent.node import preflight as api_rights
from agent.node.devices import judge_library_files
from agent.node.findings import Finding, PreflightVerdict
from agent.node.preflight import ClusterAnswer
from agent.settings.sections import Settings
from agent.witness import PodResourcesWitness

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
    cluster: ClusterAnswer | None = None
    if settings.plain is None:
        connection, server = agent_connection(settings, environ)
        try:
            async with open_session(connection) as session:
                cluster = await ask_cluster(session, settings, server, reader=reader)
        except (ApiError, SettingsError) as error:
            failure, remedy = failure_of(error)
            cluster = ClusterAnswer(server, failure=failure, remedy=remedy)
    scan, driver = await driver_findings(settings, environ)
    library = await library_findings(settings)
    findings = [*path_findings(settings), bytecode_finding(), *library, *driver]
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
    paths, home = settings.paths, settings.paths.hook / "vgpu"
    hook, inner = look_at(paths.hook), [look_at(path) for path in (home, home / "containers")]
    if inner[0].kind:  # a pod mounts only this directory, and its root is read-only
        hook = msgspec.structs.replace(hook, writable=inner[0].writable)
    made = [preflight.judge_path(look_at(path), made=True) for path in (paths.state, paths.run)]
    below = [preflight.judge_path(place, made=True) for place in inner if place.kind]
    wrong = [finding for finding in below if finding.verdict is not PreflightVerdict.OK]
    return [*made, preflight.judge_path(hook, made=False), *wrong]


def bytecode_finding() -> Finding:
    """Judge whether this program, as far as it is loaded, was compiled when it was installed."""
    modules = list(sys.modules.values())
    return preflight.judge_bytecode(str(Path(agent.__file__).parent), uncompiled(modules))


async def library_findings(settings: Settings) -> tuple[Finding, ...]:
    """Judge whether HAMi-core's files exist, and whether containers load them."""
    plain, home = settings.plain, settings.paths.hook / "vgpu"
    needed = plain is None or plain.memory_limits
    async with Worker("disk", 1) as worker:
        version = settings.library_version
        hooks = HostHookDirs(settings.paths.hook, Path("/dev"), version, worker, worker)
        try:
            facts = await hooks.facts()
        except (StateError, OSError) as error:
            return (preflight.judge_library(str(home), (str(error),), needed=needed),)
    there = preflight.judge_library(str(home), facts.missing, needed=needed)
    if facts.missing or not needed:
        return (there,)
    library, preload = library_file(Path(facts.library)), library_file(home / "ld.so.preload")
    return (there, *judge_library_files(library, preload, facts))


async def driver_findings(
    settings: Settings, environ: Mapping[str, str]
) -> tuple[Scan | None, tuple[Finding, ...]]:
    """Scan within 15 s; return the last scan, None if there is none; judge it and CDI's names."""
    library = settings.driver.nvml_library or "NVIDIA's library (NVML)"
    scan, failure, remedy = await last_scan(_scans(settings))
    name = settings.driver.simulate or library
    findings = tuple(preflight.judge_driver(name, scan, failure, remedy))
    if not looks_up_cdi(settings.edits):
        return scan, findings
    defined = None
    async with Worker("cdi", 1) as worker:
        cdi = cdi_directories(settings, environ, worker)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                defined = await cdi.names(settings.edits.cdi_spec_dirs)
    sharing, gpus = settings.sharing, scan.gpus if scan else ()
    shared = [gpu.uuid for gpu in gpus if not (sharing.filters(gpu) or gpu.mig_enabled)]
    return scan, (*findings, preflight.judge_cdi(shared, settings.edits, defined))


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
    witness = PodResourcesWitness(path, deadline=2.0)  # a person waits for this, and no pod
    held: int | None = None
    failure = ""
    asks = True
    try:
        containers = (each for pod in await witness.list() for each in pod.containers)
        held = sum(1 for each in containers if each.ids.get(settings.sharing.resource))
        await witness.get("default", "hami-agent-doctor")
    except WitnessUnsupported:
        asks = False
    except KubeletError as error:
        failure = str(error)
    finally:
        witness.close()
    return preflight.judge_witness(str(path), held, failure, asks=asks, serving=serving)


def agent_connection(settings: Settings, environ: Mapping[str, str]) -> tuple[Connection, str]:
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
    review = NodeReader(session, settings.node)
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
