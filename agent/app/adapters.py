"""The outside world, opened once: what the services reach through their ports."""

import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from agent.core.ports import Driver
from agent.host.cgroups import CgroupContainers
from agent.host.clock import SystemClock
from agent.host.disk import HostDisk
from agent.host.hookdirs import HostHookDirs
from agent.host.kube.api import KubeNode, KubePods
from agent.host.kube.connection import Connection, check
from agent.host.kube.events import EventPoster
from agent.host.kube.session import KubeSession
from agent.host.kubelet import KubeletRegistrar
from agent.host.kubelet_records import KubeletRecordsFile
from agent.host.nvml.driver import NvmlDriver
from agent.host.nvml.library import pynvml
from agent.host.podresources import PodResourcesWitness
from agent.host.worker import Worker
from agent.settings.schema import Settings

DISK_QUEUE = 64
"""Pieces of blocking work that may wait for the worker thread."""


@dataclasses.dataclass(frozen=True, slots=True)
class Adapters:
    """Every adapter, by the port that it fills."""

    driver: Driver
    worker: Worker
    disk: HostDisk
    hooks: HostHookDirs
    witness: PodResourcesWitness
    registrar: KubeletRegistrar
    records: KubeletRecordsFile
    containers: CgroupContainers
    session: KubeSession
    node: KubeNode
    pods: KubePods
    clock: SystemClock
    random: random.Random


@contextlib.asynccontextmanager
async def open_adapters(settings: Settings, environ: Mapping[str, str]) -> AsyncIterator[Adapters]:
    """Open them, and close them in reverse.

    Raises SettingsError, StateError, PermissionFault: something that must be there is not.
    """
    chance = random.SystemRandom()
    clock = SystemClock()
    kubeconfig = Path(settings.kubeconfig) if settings.kubeconfig else None
    connection = Connection(kubeconfig=kubeconfig, environment=environ)
    check(connection)
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(Worker("disk", DISK_QUEUE))
        disk = await HostDisk.open(settings.paths.state, worker)
        stack.callback(disk.close)
        driver = await stack.enter_async_context(_driver(settings))
        session = KubeSession(connection, chance)
        stack.push_async_callback(session.close)
        events = EventPoster(session, settings.node, clock)
        witness = PodResourcesWitness(settings.paths.pod_resources_socket)
        stack.callback(witness.close)
        paths = settings.paths
        yield Adapters(
            driver=driver,
            worker=worker,
            disk=disk,
            hooks=HostHookDirs(paths.hook, Path("/dev"), settings.library_version, worker),
            witness=witness,
            registrar=KubeletRegistrar(paths.kubelet_socket),
            records=KubeletRecordsFile(paths.plugins, worker),
            containers=CgroupContainers(paths.cgroup, worker),
            session=session,
            node=KubeNode(session, settings.node),
            pods=KubePods(session, settings.node, settings.resource, events),
            clock=clock,
            random=chance,
        )


@contextlib.asynccontextmanager
async def _driver(settings: Settings) -> AsyncIterator[Driver]:
    """NVML, or simulated GPUs where the settings name some."""
    spec = settings.driver.simulate
    if spec is not None:
        # The models are not imported where a real driver is used.
        from agent.sandbox.driver import open_simulation  # noqa: PLC0415

        socket_path = settings.paths.run / "simulate.sock"
        async with open_simulation(spec, socket_path=socket_path) as simulated:
            yield simulated
        return
    library = settings.driver.nvml_library
    driver = NvmlDriver(
        pynvml(), path=Path(library) if library else None, sys_root=settings.paths.sysfs
    )
    try:
        yield driver
    finally:
        await driver.close()
