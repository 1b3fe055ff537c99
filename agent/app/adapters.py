"""The outside world as far as a registration needs it, opened once."""

import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator
from pathlib import Path

from agent.core.ports import Driver
from agent.host.clock import SystemClock
from agent.host.disk import HostDisk
from agent.host.hook.directories import HostHookDirs
from agent.host.kubelet import KubeletRegistrar
from agent.host.watch import HostFileWatch
from agent.host.worker import Worker
from agent.settings.sections import Settings

DISK_QUEUE = 64
"""Pieces of blocking work that may wait for the worker thread."""

CLEARING_QUEUE = 2
"""A part of a removal and one of a look, which may wait while a file system hangs."""

READER_QUEUE = 2
"""Readings that may wait while a file system hangs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters by the port that they fill. `worker` is for blocking work, `loader` for imports.

    The state's disk has a thread of its own: while it hangs, everything else goes on and can say
    so. So has `reader`, for the settings files, which may lie anywhere. What containers left is
    removed, and what they keep is counted, on another one, for it can be millions of files.
    """

    driver: Driver
    worker: Worker
    loader: Worker
    reader: Worker
    files: HostFileWatch
    disk: HostDisk
    hooks: HostHookDirs
    registrar: KubeletRegistrar
    clock: SystemClock
    random: random.Random


@contextlib.asynccontextmanager
async def open_disk(settings: Settings) -> AsyncIterator[HostDisk]:
    """The state's disk, with its own thread. Raises StateError, PermissionFault."""
    async with Worker("state", DISK_QUEUE) as state:
        disk = await HostDisk.open(settings.paths.state, state)
        with contextlib.closing(disk):
            yield disk


@contextlib.asynccontextmanager
async def open_adapters(settings: Settings, disk: HostDisk) -> AsyncIterator[Adapters]:
    """Open the others, and close them in reverse.

    Raises SettingsError, PermissionFault: something that must be there is not.
    """
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(Worker("disk", DISK_QUEUE))
        loader = await stack.enter_async_context(Worker("loader", DISK_QUEUE))
        reader = await stack.enter_async_context(Worker("settings", READER_QUEUE))
        clearing = await stack.enter_async_context(Worker("clearing", CLEARING_QUEUE))
        driver = await stack.enter_async_context(open_driver(settings))
        paths = settings.paths
        version = settings.library_version
        yield Adapters(
            driver=driver,
            worker=worker,
            loader=loader,
            reader=reader,
            files=HostFileWatch(reader),
            disk=disk,
            hooks=HostHookDirs(paths.hook, Path("/dev"), version, worker, clearing),
            registrar=KubeletRegistrar(paths.kubelet_socket, fenced=settings.fenced),
            clock=SystemClock(),
            random=random.SystemRandom(),
        )


@contextlib.asynccontextmanager
async def open_driver(settings: Settings) -> AsyncIterator[Driver]:
    """NVML, or simulated GPUs where the settings name some; only the one in use is imported."""
    spec = settings.driver.simulate
    if spec is not None:
        from agent.sandbox.driver import open_simulation  # noqa: PLC0415

        socket_path = settings.paths.run / "simulate.sock"
        async with open_simulation(spec, socket_path=socket_path) as simulated:
            yield simulated
        return
    from agent.host.nvml.driver import NvmlDriver  # noqa: PLC0415
    from agent.host.nvml.library import pynvml  # noqa: PLC0415

    library = settings.driver.nvml_library
    driver = NvmlDriver(
        pynvml(),
        path=Path(library) if library else None,
        driver_root=settings.driver.root,
        sys_root=settings.paths.sysfs,
    )
    try:
        yield driver
    finally:
        await driver.close()
