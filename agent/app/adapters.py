"""What all services stand on: the adapters to host and driver, and the facts of the node."""

import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from agent.allocate.match import MatchSettings
from agent.cluster import NodeView, PodTable, PodUid
from agent.hami.register import ReportSettings
from agent.hookdirs import HostHookDirs
from agent.host.files import HostDisk, HostFileWatch
from agent.host.node import CdiDirectories
from agent.host.process import SystemClock, Worker
from agent.kit.cell import Cell
from agent.kit.tasks import Offload
from agent.kubelet.register import KubeletRegistrar
from agent.ledger import EditSettings
from agent.model import Inventory, SharingSettings, SliceList
from agent.ports import Driver
from agent.settings.schema import Settings

DISK_QUEUE = 64
"""Blocking calls that may wait for a worker thread."""

CLEARING_QUEUE = 2
"""Calls that may wait while a file system hangs: one of a removal and one of a measurement."""

REGIONS_QUEUE = 2
"""Calls that may wait while a file system hangs: one that reads regions and one that writes."""

READER_QUEUE = 2
"""Reads of settings files that may wait while a file system hangs."""


class Adapters(msgspec.Struct, frozen=True):
    """The adapters by port. `worker` runs blocking calls.

    The state's disk and `reader` (settings files, on any file system) have threads of their own:
    while one hangs, the rest goes on and can report it. One more thread removes and measures the
    directories of containers, which can hold millions of files. One more reads and writes regions,
    so that no Allocate waits for them.
    """

    driver: Driver
    worker: Worker
    reader: Worker
    files: HostFileWatch
    disk: HostDisk
    hooks: HostHookDirs
    cdi: CdiDirectories
    regions: Worker
    registrar: KubeletRegistrar
    clock: SystemClock
    random: random.Random


@contextlib.asynccontextmanager
async def open_disk(settings: Settings) -> AsyncIterator[HostDisk]:
    """Open the state's disk, with its own thread. Raises StateError, PermissionFault."""
    async with Worker("state", DISK_QUEUE) as state:
        disk = await HostDisk.open(settings.paths.state, state)
        with contextlib.closing(disk):
            yield disk


@contextlib.asynccontextmanager
async def open_adapters(
    settings: Settings, disk: HostDisk, environ: Mapping[str, str]
) -> AsyncIterator[Adapters]:
    """Open the other adapters; close them in reverse order.

    Raises SettingsError, PermissionFault: something that the agent needs is missing.
    """
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(Worker("disk", DISK_QUEUE))
        reader = await stack.enter_async_context(Worker("settings", READER_QUEUE))
        regions = await stack.enter_async_context(Worker("regions", REGIONS_QUEUE))
        clearing = await stack.enter_async_context(Worker("clearing", CLEARING_QUEUE))
        driver = await stack.enter_async_context(open_driver(settings))
        paths = settings.paths
        version = settings.library_version
        yield Adapters(
            driver=driver,
            worker=worker,
            reader=reader,
            files=HostFileWatch(reader),
            disk=disk,
            hooks=HostHookDirs(settings.hook_path, Path("/dev"), version, worker, clearing),
            cdi=cdi_directories(settings, environ, reader),
            regions=regions,
            registrar=KubeletRegistrar(paths.kubelet_socket, fenced=settings.fenced),
            clock=SystemClock(),
            random=random.SystemRandom(),
        )


def cdi_directories(
    settings: Settings, environ: Mapping[str, str], offload: Offload
) -> CdiDirectories:
    """The CDI specifications of this host, which a pod sees only where they are mounted."""
    in_pod = settings.kubeconfig is None and "KUBERNETES_SERVICE_HOST" in environ
    return CdiDirectories(offload, in_pod=in_pod)


@contextlib.asynccontextmanager
async def open_driver(settings: Settings) -> AsyncIterator[Driver]:
    """Open NVML, or the simulated GPUs of the settings. Only the driver in use is imported."""
    spec = settings.driver.simulate
    if spec is not None:
        from agent.sandbox.driver import open_simulation  # noqa: PLC0415

        socket_path = settings.paths.run / "simulate.sock"
        async with open_simulation(spec, socket_path=socket_path) as simulated:
            yield simulated
        return
    from agent.gpu.driver import NvmlDriver  # noqa: PLC0415

    library = settings.driver.nvml_library
    driver = NvmlDriver(
        path=Path(library) if library else None,
        driver_root=settings.driver.root,
        sys_root=settings.paths.sysfs,
    )
    try:
        yield driver
    finally:
        await driver.close()


# The shared facts of the node, each in one cell with one writer.


class SharedCells(msgspec.Struct, frozen=True):
    """Cells that more than one room reads.

    Each has one writer: `app.settings` for sharing, resource, report, edits and match; `inventory`
    for inventory and slices; `kube.watches` for pods and node; `settle` for outlived. `state`,
    `kubelet.register` and `report` write cells of their own.
    """

    sharing: Cell[SharingSettings]
    resource: Cell[str]
    report: Cell[ReportSettings]
    edits: Cell[EditSettings]
    match: Cell[MatchSettings]
    inventory: Cell[Inventory]
    slices: Cell[SliceList]
    pods: Cell[PodTable]
    node: Cell[NodeView | None]
    outlived: Cell[Mapping[str, PodUid]]


def new_facts(settings: Settings) -> SharedCells:
    """Cells with the settings of the start, and nothing else known yet."""
    return SharedCells(
        sharing=Cell(settings.sharing),
        resource=Cell(settings.sharing.resource),
        report=Cell(settings.report),
        edits=Cell(settings.edits),
        match=Cell(settings.match),
        inventory=Cell(Inventory()),
        slices=Cell(SliceList()),
        pods=Cell(PodTable()),
        node=Cell(None),
        outlived=Cell({}),
    )
