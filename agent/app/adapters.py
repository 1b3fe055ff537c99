"""What all services stand on: the adapters to host and driver, and the facts of the node."""

import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from agent.cluster import NodeView, PodTable, PodUid
from agent.hookdirs import HostHookDirs
from agent.host.files import HostDisk, Worker
from agent.host.node import CdiDirectories
from agent.kit.cell import Cell
from agent.kit.tasks import Offload
from agent.kit.timing import SystemClock
from agent.model import Inventory, SliceList
from agent.ports import Driver
from agent.settings.schema import Settings


class Adapters(msgspec.Struct, frozen=True):
    """The adapters of a running agent. `worker` runs blocking calls.

    The state's disk and `reader` (settings files and CDI, on any file system) have threads of their
    own: while one hangs, the rest goes on and can report it. One more thread removes and measures
    the directories of containers, which can hold millions of files. One more reads and writes
    regions, so that no Allocate waits for them.
    """

    driver: Driver
    worker: Worker
    reader: Worker
    disk: HostDisk
    hooks: HostHookDirs
    cdi: CdiDirectories
    regions: Worker
    clock: SystemClock
    random: random.Random


@contextlib.asynccontextmanager
async def open_adapters(
    settings: Settings, disk: HostDisk, environ: Mapping[str, str]
) -> AsyncIterator[Adapters]:
    """Open the other adapters; close them in reverse order.

    Raises SettingsError, PermissionFault: something that the agent needs is missing.
    """
    async with (
        Worker("disk") as worker,
        Worker("settings") as reader,
        Worker("regions") as regions,
        Worker("clearing") as clearing,
        open_driver(settings) as driver,
    ):
        version = settings.library_version
        yield Adapters(
            driver=driver,
            worker=worker,
            reader=reader,
            disk=disk,
            hooks=HostHookDirs(settings.hook_path, Path("/dev"), version, worker, clearing),
            cdi=cdi_directories(settings, environ, reader),
            regions=regions,
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
    if settings.simulate is not None:
        from agent.sandbox.driver import open_simulation  # noqa: PLC0415

        spec, socket_path = settings.simulate, settings.paths.run / "simulate.sock"
        async with open_simulation(spec, socket_path=socket_path) as simulated:
            yield simulated
        return

    from agent.gpu.driver import NvmlDriver  # noqa: PLC0415

    library = settings.nvml_library
    driver = NvmlDriver(
        path=Path(library) if library else None,
        driver_root=settings.driver_root,
        sys_root=settings.paths.sysfs,
    )
    try:
        yield driver
    finally:
        await driver.close()


class SharedCells:
    """Cells that more than one room reads: the settings of the start, and nothing else known yet.

    Each has one writer: `app.settings` for sharing, resource, report, edits and match; `inventory`
    for inventory and slices; `kube.watches` for pods and node; `settle` for orphaned_locks.
    `state`, `kubelet.register` and `report` write cells of their own.
    """

    def __init__(self, settings: Settings) -> None:
        self.sharing = Cell(settings.sharing)
        self.resource = Cell(settings.sharing.resource)
        self.report = Cell(settings.report)
        self.edits = Cell(settings.edits)
        self.match = Cell(settings.match)
        self.inventory = Cell(Inventory())
        self.slices = Cell(SliceList())
        self.pods = Cell(PodTable())
        self.node: Cell[NodeView | None] = Cell(None)
        self.orphaned_locks: Cell[Mapping[str, PodUid]] = Cell({})
