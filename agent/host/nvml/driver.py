"""The Driver port over NVML: scans, probes, samples and events."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import structlog

from agent.core.errors import DriverError, DriverMissing, GpuError
from agent.core.health.reports import DriverEvent, Probe, ProbeOutcome
from agent.core.inventory.gpu import NO_INDEX, Gpu, GpuFault, GpuSample, GpuUuid, Scan, Trouble
from agent.host.nvml import facts, links, signs
from agent.host.nvml import library as nvml
from agent.host.nvml.handles import RELEASED, UNPLACED, Handles
from agent.host.nvml.indexes import Indexes
from agent.host.nvml.listening import Listening
from agent.host.nvml.session import NO_ANSWER, NvmlSession, OpenedSession

T = TypeVar("T")

CALL_DEADLINE: Final = 2.0
REMOVED_AFTER: Final = 60.0
"""Seconds without the library's file until it counts as removed."""

log = structlog.get_logger(__name__)


class NvmlDriver:
    """Implements agent.core.ports.Driver.

    `library` is the module pynvml or one with its functions. `path` names the library file to use
    instead of the soname; `driver_root` is a directory like the host's `/` to search first.
    `sys_root` is the mounted /sys. Each call has `deadline` seconds: one about a GPU that does not
    return makes only that GPU silent.
    """

    def __init__(
        self,
        library: nvml.NvmlLibrary,
        *,
        path: Path | None = None,
        driver_root: Path | None = None,
        sys_root: Path = Path("/sys"),
        deadline: float = CALL_DEADLINE,
        now: Callable[[], float] = time.monotonic,  # noqa: TID251 -- check() runs on a thread
    ) -> None:
        def find() -> Path | None:
            return path or nvml.library_below(driver_root)

        self._find = find
        self._now = now
        self._library = library
        self._sys_root = sys_root
        self._session = NvmlSession(
            library, find, sys_root, deadline, self._session_ended, self._quiet, self._back
        )
        self._call = self._session.call
        self._indexes = Indexes()
        self._links: Mapping[GpuUuid, links.LinkRow] | None = None
        self._renewed = False
        """A new session was begun because all GPUs failed, and none has answered since."""
        self._there_at = self._now()
        """When a look found the library's file last."""
        self._slow: set[str] = set()
        """The GPUs that did not answer in time when they were last described."""
        self._described: frozenset[str] = frozenset()
        """The addresses of all GPUs that were ever described."""
        self._handles = Handles(library)
        self._listening = Listening(library, self._session, self._indexes, self._handles)

    async def scan(self) -> Scan:
        """Describe all GPUs. Raises DriverMissing, DriverError."""
        opened = await self._session.open()
        if self._handles.released:
            return await self._scan_others(opened)
        count = await self._session.whole(opened, self._library.nvmlDeviceGetCount)
        self._counted(count)
        found: dict[int, Gpu] = {}
        troubled: dict[int, GpuFault] = {}
        async with asyncio.TaskGroup() as tasks:
            for index in range(count):
                tasks.create_task(self._describe(opened, index, found, troubled))
        self._session.check(opened)
        self._renewed = self._renewed and not found
        if not self._indexes.seen({index: gpu.uuid for index, gpu in found.items()}):
            self._listening.forget()
        faults = self._indexes.named(troubled)
        self._described |= {gpu.pci for gpu in found.values()}
        if not faults:  # else one of these may be the GPU that is not described
            unlisted = partial(facts.unlisted, self._sys_root, self._described)
            faults = await self._session.whole(opened, unlisted)
        uuids = [gpu.uuid for gpu in found.values()]
        self._session.keep([*uuids, *(fault.gpu for fault in faults)])
        peers = {found[index].uuid: found[index] for index in sorted(found)}
        rows = await self._link_rows(opened, peers)
        silent = [fault.gpu for fault in faults if not fault.lost]
        await self._listening.follow(opened, sorted(found), peers.keys(), silent)
        self._session.check(opened)
        gpus = tuple(links.linked(gpu, peers, rows) for gpu in peers.values())
        self._handles.seen(gpus, faults)
        return Scan(opened.driver_version, gpus, faults, opened.library_version)

    async def _scan_others(self, opened: OpenedSession) -> Scan:
        """Describe the GPUs that are not released; their known addresses and links stay."""
        found: dict[int, Gpu] = {}
        troubled: dict[int, GpuFault] = {}
        async with asyncio.TaskGroup() as tasks:
            for index in self._handles.open_to(0):
                tasks.create_task(self._describe(opened, index, found, troubled))
        self._session.check(opened)
        known = {gpu.index: gpu for gpu in self._handles.known}
        gpus = tuple(
            msgspec.structs.replace(found[index], links=known[index].links)
            for index in sorted(found)
        )
        faults = [troubled[index] for index in sorted(troubled)]
        # Also one that was never described: it must be visible to be taken back.
        places = {gpu.uuid: gpu.index for gpu in self._handles.known}
        faults.extend(
            GpuFault(uuid, RELEASED, Trouble.RELEASED, places.get(uuid, NO_INDEX))
            for uuid in sorted(self._handles.released, key=lambda uuid: (places.get(uuid, 0), uuid))
        )
        faults.extend(
            GpuFault(uuid, UNPLACED, Trouble.UNPLACED) for uuid in sorted(self._handles.unplaced)
        )
        await self._listening.follow(opened, sorted(found), [gpu.uuid for gpu in gpus], [])
        self._session.check(opened)
        return Scan(opened.driver_version, gpus, tuple(faults), opened.library_version)

    async def probe(self, uuid: GpuUuid) -> Probe:
        """Probe one GPU. Raises DriverMissing, DriverError."""
        opened = await self._session.open()
        try:
            probe = await self._call(
                opened, uuid, partial(signs.probe, self._library, self._handles, uuid)
            )
        except TimeoutError as error:
            probe = Probe(uuid, ProbeOutcome.SILENT, str(error) or NO_ANSWER)
        except DriverError as error:
            self._session.end(error, opened)
            raise
        self._renewed = self._renewed and probe.outcome is not ProbeOutcome.PASSED
        await self._listening.hear_again(opened, probe)
        return msgspec.structs.replace(probe, unmonitored=self._listening.obstacle(uuid))

    async def sample(self, uuid: GpuUuid) -> GpuSample:
        """Read how much one GPU is used. Raises GpuError, DriverMissing, DriverError."""
        return await self._ask(uuid, partial(signs.sample, self._library, self._handles, uuid))

    def events(self, opened: Callable[[], None] | None = None) -> AsyncIterator[DriverEvent]:
        """Yield events as they come. GPUs that cannot report are logged; only probes watch them.

        `opened` is called once all other GPUs report, which may take a call's whole deadline.

        Raises DriverMissing, DriverError when the session ends, or the wait does not return.
        """
        return self._listening.events(opened)

    async def release(self, uuids: Collection[GpuUuid], *, everything: bool = False) -> None:
        """Close these GPUs and use none of them until it is taken back.

        With `everything`, also close all others until any GPU is taken back. A session holds what
        it opened, so it is ended. If GPUs are left, they are used in a new one.

        Raises GpuError for an unknown GPU, DriverError when a call does not return and holds them.
        """
        self._handles.release(uuids, everything=everything)
        if self._handles.all_released:
            self._session.withheld = "all GPUs are released: hami-agent recheck takes them back"
        await self._session.shut("GPUs are released; a new session begins without them")

    def take_back(self, uuid: GpuUuid) -> None:
        """Use a released GPU again."""
        self._handles.take_back(uuid)
        self._listening.unhear(uuid)
        self._session.withheld = ""

    def check(self) -> None:
        """Raise DriverMissing: a package replaced or removed the library in use; blocks nothing.

        Containers get what lies there now, and the kernel module is that of the library in use. An
        upgrade removes the library and writes it again, so one look without it says nothing.
        """
        other = self._session.present and nvml.successor(self._library, self._find())
        if other:
            raise DriverMissing(
                f"The driver's library was replaced by {other}, and the kernel module is still "
                "that of the former one, so a new container's CUDA fails with a version mismatch",
                remedy="drain the node and reboot it, or reload the module [P-DRIVER]",
            )
        gone = self._session.present and nvml.removed(self._library)
        self._there_at = self._there_at if gone else self._now()
        if self._now() - self._there_at >= REMOVED_AFTER:
            raise DriverMissing(
                f"The driver's library {gone} was removed, so a container that starts now gets no "
                "driver",
                remedy="install the driver again, or drain the node and reboot it [P-DRIVER]",
            )

    async def renew(self) -> bool:
        """End the session so that the next call begins another; only once until a GPU answers."""
        if self._renewed or self._session.present is None:
            return False
        self._renewed = True
        self._session.end(DriverError("all GPUs fail; a new session begins"))
        return True

    async def close(self) -> None:
        """End the session; a second call does nothing."""
        await self._session.close()

    def _session_ended(self, error: DriverError) -> None:
        self._links = None
        self._listening.fail(error)

    async def _quiet(self) -> bool:
        return await self._listening.quiet()

    def _back(self, name: str) -> None:
        """Note that a stuck GPU answers; if it was not described, ask for a scan."""
        self._listening.back(name)
        if name in self._slow:
            self._slow.discard(name)
            self._listening.changed()

    def _counted(self, count: int) -> None:
        if not self._indexes.counted(count):
            self._listening.forget()

    async def _ask(self, uuid: GpuUuid, work: Callable[[], T]) -> T:
        """Ask one GPU; a failure says nothing about its health. Raises GpuError, DriverError."""
        opened = await self._session.open()
        try:
            return await self._call(opened, uuid, work)
        except TimeoutError as error:
            raise GpuError(uuid, str(error) or NO_ANSWER) from error
        except self._library.NVMLError as error:
            translated = nvml.translate(error, uuid)
            if isinstance(translated, DriverError):
                self._session.end(translated, opened)
            raise translated from error

    async def _describe(
        self, opened: OpenedSession, index: int, found: dict[int, Gpu], faults: dict[int, GpuFault]
    ) -> None:
        """Put GPU `index` into `found`, or the failure into `faults`."""
        name = self._indexes.name(index)
        work = partial(facts.describe, self._library, self._handles, index, self._sys_root)
        try:
            found[index] = await self._call(opened, name, work)
        except TimeoutError:
            self._slow.add(name)
            faults[index] = GpuFault(name, NO_ANSWER, Trouble.SILENT, index)
        except (DriverError, GpuError) as error:
            # The session is over: scan() raises that.
            faults[index] = GpuFault(name, str(error), index=index)
        except (self._library.NVMLError, ValueError) as error:
            # ValueError: the binding could not decode a text.
            translated = nvml.translate(error, name)
            if isinstance(translated, DriverError):
                self._session.end(translated, opened)
            trouble = nvml.trouble(error)
            if trouble in {Trouble.LOST, Trouble.RESET}:
                self._listening.unhear(name)
            faults[index] = GpuFault(name, str(error), trouble, index)
        else:
            self._slow.discard(name)

    async def _link_rows(
        self, opened: OpenedSession, peers: Mapping[GpuUuid, Gpu]
    ) -> Mapping[GpuUuid, links.LinkRow]:
        """The links between the GPUs, which are read once for each set of GPUs."""
        if self._links is not None and self._links.keys() == peers.keys():
            return self._links
        rows: dict[GpuUuid, links.LinkRow] = {}
        async with asyncio.TaskGroup() as tasks:
            for gpu in peers.values():
                tasks.create_task(self._link_row(opened, gpu, peers, rows))
        if rows.keys() == peers.keys():
            self._links = rows
        return rows

    async def _link_row(
        self,
        opened: OpenedSession,
        gpu: Gpu,
        peers: Mapping[GpuUuid, Gpu],
        rows: dict[GpuUuid, links.LinkRow],
    ) -> None:
        others = {peer: other.index for peer, other in peers.items() if peer != gpu.uuid}
        work = partial(links.link_row, self._library, self._handles, gpu, others)
        try:
            rows[gpu.uuid] = await self._call(opened, gpu.uuid, work)
        except (TimeoutError, DriverError, self._library.NVMLError, ValueError) as error:
            log.info("driver.links_unknown", gpu=gpu.uuid, err=str(error) or NO_ANSWER)
