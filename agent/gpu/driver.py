"""The driver by NVML: scan, probe, sample, events and release."""

import asyncio
import collections
import ctypes
import operator
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import pynvml
import structlog

from agent.errors import DriverError, DriverMissing, GpuError
from agent.gpu import nvml
from agent.gpu.nvml import (
    DRIVER,
    NO_ANSWER,
    CallFailed,
    EventStream,
    Handle,
    NvmlLibrary,
    NvmlSession,
    OpenedSession,
    Registered,
)
from agent.model import (
    MIB,
    NAMELESS,
    NO_INDEX,
    DriverEvent,
    FabricState,
    Gpu,
    GpuFault,
    GpuSample,
    GpuSigns,
    GpuUuid,
    Link,
    PciPath,
    Probe,
    ProbeOutcome,
    RecoveryAction,
    Scan,
    Trouble,
    attributed,
)

log = structlog.get_logger(__name__)

T = TypeVar("T")

# Which GPU has which index, and the driver's handle of each. Nothing else opens a GPU.
#
# The library opens a GPU with its first handle; for a handle by UUID it may open others too. A GPU
# stays open until all sessions end. Until then nobody can reset it, change its MIG mode or unload
# the driver.

RELEASED = "it is released: hami-agent recheck takes it back"
RECHECK_ALL = "it is searched for when all GPUs are taken back: hami-agent recheck all"
"""Of a GPU that was never described: its address is unknown, and only a scan of all finds it."""


class GpuTable:
    """Knows which GPU is at which index, and which may be opened.

    - It outlives sessions: a GPU that is slow at the start of one is the same as before.
    - After the indexes changed, an index names a GPU only once that GPU answered there. Until then
      an unseen GPU may be at any index that does not answer, and a fault there is assigned to none
      for certain.
    - While a GPU is released, only the PCI addresses of the known GPUs are asked: indexes change
      when a GPU goes, and a GPU that was never described may be the released one.
    """

    def __init__(self, library: NvmlLibrary) -> None:
        self._library = library
        self.count = 0
        """How many GPUs the driver lists."""
        self._seen_count = 0

        # The threads of the GPUs read these: they are only replaced, never changed.
        self._known: Mapping[GpuUuid, Gpu] = {}
        """The GPUs as they were described last; with NO_INDEX: unseen since the indexes changed."""
        self.released: frozenset[GpuUuid] = frozenset()
        """The GPUs that must not be opened."""

    def find(self, uuid: str) -> Gpu | None:
        """The GPU as it was described last, or None."""
        return self._known.get(GpuUuid(uuid))

    def released_fault(self, uuid: GpuUuid) -> GpuFault:
        """The fault by which a scan lists a released GPU."""
        index = self._known[uuid].index if uuid in self._known else NO_INDEX
        return GpuFault(uuid, RELEASED, Trouble.RELEASED, index)

    def name(self, index: int) -> str:
        """The UUID at `index` if it is known, else `index N`."""
        known = self._known.values()
        return next((gpu.uuid for gpu in known if gpu.index == index), f"{NAMELESS}{index}")

    def places(self) -> dict[str, int]:
        """The indexes that may be opened, by name."""
        if not self.released:
            return {self.name(index): index for index in range(self.count)}
        return {uuid: gpu.index for uuid, gpu in self._known.items() if uuid not in self.released}

    def seen(self, gpus: Collection[Gpu]) -> bool:
        """Note the GPUs as a scan of all described them. False when an index may have changed."""
        # When GPUs come or go, an index that was right a minute ago can name another GPU.
        fits = self._seen_count in {0, self.count} and all(
            self.name(gpu.index) in {gpu.uuid, f"{NAMELESS}{gpu.index}"}
            and self._known.get(gpu.uuid, gpu).index in {gpu.index, NO_INDEX}
            for gpu in gpus
        )
        if not fits:
            self._known = {
                uuid: msgspec.structs.replace(gpu, index=NO_INDEX)
                for uuid, gpu in self._known.items()
            }

        self._seen_count = self.count
        self._known = {**self._known, **{gpu.uuid: gpu for gpu in gpus}}
        return fits

    def named(self, faults: Iterable[GpuFault]) -> tuple[GpuFault, ...]:
        """Name the faults, and add one for each GPU that may be at an index without a name."""
        unseen = {uuid for uuid, gpu in self._known.items() if gpu.index == NO_INDEX}
        named = [msgspec.structs.replace(each, gpu=self.name(each.index)) for each in faults]

        if not any(fault.gpu.startswith(NAMELESS) for fault in named):
            # Every index has said whose it is: what is still unseen has left the node.
            self._known = {u: gpu for u, gpu in self._known.items() if u not in unseen}
            return tuple(named)

        return attributed(named, unseen)

    def release(self, uuids: Collection[GpuUuid], *, everything: bool) -> bool:
        """Let no thread open these GPUs from now on. Returns whether none may be opened.

        Raises GpuError for a GPU that was never described, unless all known ones are released with
        it, or `everything`: then no session can hold it.
        """
        are_all = everything or (
            bool(self._known) and self._known.keys() <= {*uuids, *self.released}
        )
        for uuid in uuids:
            if uuid not in self._known and not are_all:
                text = "the driver has not described it; only `hami-agent release all` releases it"
                raise GpuError(uuid, text)

        self.released |= set(uuids)
        return everything or self._known.keys() <= self.released

    # On the threads of the GPUs.

    def open(self, name: str, index: int = NO_INDEX) -> Handle:
        """Get the handle of GPU `index`, or with NO_INDEX by `name`, its UUID.

        While a GPU is released, another may have come to its index: only `name` counts.

        Raises NVMLError, GpuError when it is released.
        """
        if not self.released and index != NO_INDEX:
            return self._library.nvmlDeviceGetHandleByIndex(index)
        if not self.released:
            return self._library.nvmlDeviceGetHandleByUUID(name)

        gpu = self.find(name)
        if name in self.released or gpu is None:
            text = RELEASED if name in self.released else RECHECK_ALL
            raise GpuError(name, text)

        # sysfs writes four digits of the domain, the library eight.
        domain, _, rest = gpu.pci.partition(":")
        return self._library.nvmlDeviceGetHandleByPciBusId(f"{domain:0>8}:{rest}".upper())


# Describes a GPU by the library's answers. All functions block and run on the GPU's thread.


def bus_id(text: str) -> str:
    """Convert a PCI bus id of NVML to the form of sysfs: at least four digits of the domain.

    Domains above ffff are virtual (VMD, some clouds). Other text stays as it is.
    """
    domain, _, rest = text.lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}" if rest else text.lower()


def numa_node(sys_root: Path, bus: str) -> int | None:
    """The NUMA node of a PCI address, or None when the kernel gives none."""
    try:
        node = int((sys_root / "bus/pci/devices" / bus / "numa_node").read_text("ascii"))
    except (OSError, ValueError):
        return None

    return node if node >= 0 else None


def describe(library: NvmlLibrary, table: GpuTable, sys_root: Path, name: str, index: int) -> Gpu:
    """Describe a GPU; its links are as before. Raises NVMLError, GpuError when it is released."""
    handle = table.open(name, index)
    bus = bus_id(nvml.text_of(library.nvmlDeviceGetPciInfo(handle).busId))
    # Of the two modes, the present and the pending one, only the first decides what containers get.
    mig = nvml.maybe(library, library.nvmlDeviceGetMigMode, handle)
    # A GPU with the host's memory (GB10) does not report it.
    memory = nvml.maybe(library, library.nvmlDeviceGetMemoryInfo, handle)
    uuid = GpuUuid(nvml.text_of(library.nvmlDeviceGetUUID(handle)))
    known = table.find(uuid)
    return Gpu(
        uuid=uuid,
        index=library.nvmlDeviceGetIndex(handle) if index == NO_INDEX else index,
        name=nvml.text_of(library.nvmlDeviceGetName(handle)),
        memory_mib=None if memory is None else int(memory.total) // MIB,
        pci=bus,
        numa=numa_node(sys_root, bus),
        minor=nvml.maybe(library, library.nvmlDeviceGetMinorNumber, handle),
        mig_enabled=mig is not None and bool(mig[0]),
        links=known.links if known else (),
    )


def gpus_not_listed(sys_root: Path, described: Collection[str]) -> tuple[GpuFault, ...]:
    """The GPUs of the kernel's driver whose address was never `described`; none if sysfs is hidden.

    The library passes over a GPU whose device file it cannot open. In a container that is each GPU
    that came after its start.
    """
    bound = {link.name for link in (sys_root / "bus/pci/drivers/nvidia").glob("*:*:*.*")}
    text = "the kernel's driver has it, and its device file is missing or closed to the agent"
    return tuple(
        GpuFault(address, text, Trouble.UNLISTED) for address in sorted(bound - set(described))
    )


# Reads the links between GPUs. All functions block and run on the GPU's thread.

_PATHS: Final[Mapping[int | None, PciPath]] = {
    0: PciPath.SAME_BOARD,
    10: PciPath.SINGLE_SWITCH,
    20: PciPath.MULTI_SWITCH,
    30: PciPath.HOST_BRIDGE,
    40: PciPath.SAME_CPU,
    50: PciPath.CROSS_CPU,
}
"""NVML's topology levels (nvmlGpuTopologyLevel_t)."""


SWITCHES: Final = "switches"
"""Stands for the PCI bus ids of all NVSwitches."""


LinkRow = tuple[dict[GpuUuid, PciPath | None], collections.Counter[str]]
"""One GPU's side of its links: the path to each peer, and the NVLinks to each PCI bus id."""


def link_row(
    library: NvmlLibrary, table: GpuTable, gpus: Iterable[Gpu], uuid: str, index: int
) -> LinkRow:
    """Read what connects a GPU to each of `gpus`. Raises NVMLError, GpuError."""
    handle = table.open(uuid, index)

    paths: dict[GpuUuid, PciPath | None] = {}
    for peer in gpus:
        if peer.uuid == uuid:
            continue
        other, ask = table.open(peer.uuid, peer.index), library.nvmlDeviceGetTopologyCommonAncestor
        paths[peer.uuid] = _PATHS.get(nvml.maybe(library, ask, handle, other))

    nvlinks: collections.Counter[str] = collections.Counter()
    for link in _active_links(library, handle):
        kind = nvml.maybe(library, library.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            nvlinks[SWITCHES] += 1
            continue

        info = nvml.maybe(library, library.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        if info is not None:
            nvlinks[bus_id(nvml.text_of(info.busId))] += 1

    return paths, nvlinks


def linked(gpu: Gpu, peers: Iterable[Gpu], rows: Mapping[GpuUuid, LinkRow]) -> Gpu:
    """Return `gpu` with its links. Over switches two GPUs share the smaller number of NVLinks."""
    links = []
    if gpu.uuid in rows:
        paths, nvlinks = rows[gpu.uuid]
        for peer in peers:
            if peer.uuid != gpu.uuid:
                _, theirs = rows.get(peer.uuid, ({}, {SWITCHES: 0}))
                shared = min(nvlinks[SWITCHES], theirs[SWITCHES])
                links.append(Link(peer.uuid, paths[peer.uuid], nvlinks[peer.pci] + shared))

    return msgspec.structs.replace(gpu, links=tuple(links))


def _active_links(library: NvmlLibrary, handle: Handle) -> Iterator[int]:
    """The NVLinks that are up; a GPU without NVLinks answers that it is unable."""
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if library.nvmlDeviceGetNvLinkState(handle, link):
                yield link
        except library.NVMLError as error:
            if nvml.is_unable(error) or nvml.code(error) == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                return
            raise


# Probes and samples a GPU. All functions block and run on the GPU's thread.

_RECOVERY: Final = dict(enumerate(RecoveryAction))
"""nvmlDeviceGpuRecoveryAction_t, which numbers them in this order from 0."""

_FABRIC: Final = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: FabricState.NOT_STARTED,
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: FabricState.IN_PROGRESS,
}

_OUTCOMES: Final = {
    Trouble.LOST: ProbeOutcome.LOST,
    Trouble.RESET: ProbeOutcome.REFUSED,
    Trouble.SILENT: ProbeOutcome.SILENT,
}

_ECC: Final = (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)


def probe_of(library: NvmlLibrary, table: GpuTable, uuid: GpuUuid) -> Probe:
    """Probe the GPU. Raises NVMLError, GpuError when it is released."""
    handle = table.open(uuid)
    nvml.maybe(library, library.nvmlDeviceGetMemoryInfo, handle)
    rows = _sign(library, library.nvmlDeviceGetRemappedRows, handle)
    pending = _sign(library, library.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    signs = GpuSigns(
        rows_pending=None if rows is None else bool(rows[2]),
        rows_failed=None if rows is None else bool(rows[3]),
        pages_pending=None if pending is None else bool(pending),
        recovery=_sign(library, _recovery, library, handle),
        fabric=_sign(library, _fabric, library, handle),
    )

    if signs.rows_failed:
        return Probe(uuid, ProbeOutcome.FAILED, "a row of its memory could not be remapped", signs)

    return Probe(uuid, ProbeOutcome.PASSED, signs=signs)


def sample_of(library: NvmlLibrary, table: GpuTable, uuid: GpuUuid) -> GpuSample:
    """Read how much the GPU is used. Raises NVMLError, GpuError."""
    handle = table.open(uuid)
    rates = _sign(library, library.nvmlDeviceGetUtilizationRates, handle)
    # The first form counts what the driver reserves as used, so an idle H100 would have some 600
    # MiB in use; drivers before 510 have no other.
    memory = _sign(library, library.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if memory is None:
        memory = _sign(library, library.nvmlDeviceGetMemoryInfo, handle)

    counts, span = library.nvmlDeviceGetTotalEccErrors, pynvml.NVML_AGGREGATE_ECC
    corrected, uncorrected = (_sign(library, counts, handle, kind, span) for kind in _ECC)
    return GpuSample(
        uuid,
        gpu_percent=None if rates is None else int(rates.gpu),
        memory_percent=None if rates is None else int(rates.memory),
        used_mib=None if memory is None else int(memory.used) // MIB,
        reserved_mib=int(getattr(memory, "reserved", 0)) // MIB,
        celsius=_sign(
            library, library.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        milliwatts=_sign(library, library.nvmlDeviceGetPowerUsage, handle),
        ecc_corrected=corrected,
        ecc_uncorrected=uncorrected,
    )


def _recovery(library: NvmlLibrary, handle: Handle) -> RecoveryAction | None:
    """Raises NVMLError, also for the field's own error: a driver before 570 has no such field."""
    value = library.nvmlDeviceGetFieldValues(handle, [nvml.FIELD_RECOVERY_ACTION])[0]
    if value.nvmlReturn:
        raise library.NVMLError(value.nvmlReturn)
    return _RECOVERY.get(int(value.value.uiVal), RecoveryAction.OTHER)


def _fabric(library: NvmlLibrary, handle: Handle) -> FabricState | None:
    info = pynvml.c_nvmlGpuFabricInfo_t()
    library.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    if info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED:
        return FabricState.FAILED if info.status else FabricState.COMPLETED
    return _FABRIC.get(info.state)


def _sign(library: NvmlLibrary, ask: Callable[..., T], *args: object) -> T | None:
    return nvml.maybe(library, ask, *args, is_sign=True)


# The Driver port over NVML: scans, probes, samples and events.

CALL_DEADLINE: Final = 2.0
REMOVED_AFTER: Final = 60.0
"""Seconds without the library's file until it counts as removed."""

by_index: Final = operator.attrgetter("index")


class NvmlDriver:
    """Implements agent.ports.Driver.

    `library` is the module pynvml or one with its functions. `path` names the library file to use
    instead of the soname; `driver_root` is a directory like the host's `/` to search first.
    `sys_root` is the mounted /sys. Each call has `deadline` seconds: one about a GPU that does not
    return makes only that GPU silent.
    """

    def __init__(
        self,
        library: NvmlLibrary = pynvml,
        *,
        path: Path | None = None,
        driver_root: Path | None = None,
        sys_root: Path = Path("/sys"),
        deadline: float = CALL_DEADLINE,
        now: Callable[[], float] = time.monotonic,  # noqa: TID251 -- check() runs on a thread
    ) -> None:
        self._find: Callable[[], Path | None] = lambda: path or nvml.library_below(driver_root)
        self._now = now
        self._library = library
        self._sys_root = sys_root
        self._session = NvmlSession(library, self._find, sys_root, deadline)
        self._renewed = False
        """A new session was begun because all GPUs failed, and none has answered since."""
        self._there_at = self._now()
        """When a look found the library's file last."""
        self._described: frozenset[str] = frozenset()
        """The addresses of all GPUs that were ever described."""
        self._table = GpuTable(library)

    async def scan(self) -> Scan:
        """Describe all GPUs, or those that are not released. Raises DriverMissing, DriverError."""
        opened = await self._session.open()
        places = await self._places(opened)
        released = sorted(self._table.released)
        found, troubled = await self._describe(opened, places)

        faults: tuple[GpuFault, ...]
        if released:
            # Also one that was never described: it must be visible to be taken back.
            faults = (*troubled, *map(self._table.released_fault, released))
        else:
            self._renewed = self._renewed and not found
            found = await self._with_links(opened, found)
            if not self._table.seen(found) and self._stream is not None:
                # The indexes changed: an event of a handle may be of another GPU now.
                self._stream.known, self._stream.obstacles = {}, {}
            faults = self._table.named(troubled)

        self._described |= {gpu.pci for gpu in found}
        # The library lists no GPU whose device file it cannot open: in a container, each GPU that
        # came after the container's start. With a fault, that GPU may be the one that is not
        # described.
        if not faults:
            faults = await self._session.call(
                opened, DRIVER, partial(gpus_not_listed, self._sys_root, self._described)
            )

        # Register the GPUs at new indexes, and forget those that are not there.
        places = {gpu.uuid: gpu.index for gpu in found}
        if (stream := self._stream) is not None:
            here = {*places, *(fault.gpu for fault in faults if not fault.lost)}
            stream.obstacles = {gpu: why for gpu, why in stream.obstacles.items() if gpu in here}
            await self._register(opened, stream, places)

        self._session.check(opened)
        return Scan(opened.driver_version, tuple(found), faults)

    async def probe(self, uuid: GpuUuid) -> Probe:
        """Probe one GPU. Raises DriverMissing, DriverError."""
        opened = await self._session.open()
        try:
            probe = await self._session.call(
                opened, uuid, partial(probe_of, self._library, self._table, uuid)
            )
        except CallFailed as error:
            probe = Probe(uuid, _OUTCOMES.get(error.trouble, ProbeOutcome.FAILED), error.text)

        self._renewed = self._renewed and probe.outcome is not ProbeOutcome.PASSED
        # The driver forgets the registration of a GPU that is reset, and tells nobody: without
        # this, its next XID would be heard by no set.
        if probe.outcome in {ProbeOutcome.LOST, ProbeOutcome.REFUSED}:
            self._note_reset(uuid)
        elif self._stream is not None and probe.outcome is not ProbeOutcome.SILENT:
            known = self._table.find(uuid)
            await self._register(opened, self._stream, {uuid: known.index} if known else {})

        stream = self._stream
        obstacle = "" if stream is None else stream.obstacles.get(uuid, "")
        return msgspec.structs.replace(probe, unmonitored=obstacle)

    async def sample(self, uuid: GpuUuid) -> GpuSample:
        """Read how much one GPU is used. Raises GpuError, DriverMissing, DriverError."""
        work = partial(sample_of, self._library, self._table, uuid)
        return await self._session.call(await self._session.open(), uuid, work)

    async def release(self, uuids: Collection[GpuUuid], *, everything: bool = False) -> None:
        """Close these GPUs and use none of them until it is taken back.

        With `everything`, also close all others until any GPU is taken back. A session holds what
        it opened, so it is ended. If GPUs are left, they are used in a new one.

        Raises GpuError for an unknown GPU, DriverError when a call does not return and holds them.
        """
        if self._table.release(uuids, everything=everything):
            self._session.withheld = "all GPUs are released: hami-agent recheck takes them back"

        await self._session.shut("GPUs are released; a new session begins without them")

    def take_back(self, uuid: GpuUuid) -> None:
        """Use a released GPU again."""
        self._table.released -= {uuid}
        self._note_reset(uuid)
        self._session.withheld = ""

    def check(self) -> None:
        """Raise DriverMissing: a package replaced or removed the library in use; blocks nothing.

        Containers get what lies there now, and the kernel module is that of the library in use. An
        upgrade removes the library and writes it again, so one look without it says nothing.
        """
        other = self._session.current and nvml.successor(self._library, self._find())
        if other:
            raise DriverMissing(
                f"The driver's library was replaced by {other}, and the kernel module is still "
                "that of the former one, so a new container's CUDA fails with a version mismatch",
                remedy="drain the node and reboot it, or reload the module [P-DRIVER]",
            )

        gone = self._session.current and nvml.removed(self._library)
        self._there_at = self._there_at if gone else self._now()

        if self._now() - self._there_at >= REMOVED_AFTER:
            raise DriverMissing(
                f"The driver's library {gone} was removed, so a container that starts now gets no "
                "driver",
                remedy="install the driver again, or drain the node and reboot it [P-DRIVER]",
            )

    async def renew(self) -> bool:
        """End the session so that the next call begins another; only once until a GPU answers."""
        if self._renewed or self._session.current is None:
            return False

        self._renewed = True
        self._session.end(DriverError("all GPUs fail; a new session begins"))
        return True

    async def close(self) -> None:
        """End the session; a second call does nothing."""
        await self._session.close()

    async def _each(
        self, opened: OpenedSession, places: Mapping[str, int], work: Callable[[str, int], T]
    ) -> dict[str, T | GpuError | DriverError]:
        """Call `work` with each name and index at once. Returns the answers and failures."""
        answers: dict[str, T | GpuError | DriverError] = {}

        async def one(name: str, index: int) -> None:
            try:
                answers[name] = await self._session.call(opened, name, partial(work, name, index))
            except (DriverError, GpuError) as error:
                answers[name] = error

        async with asyncio.TaskGroup() as tasks:
            for name, index in places.items():
                tasks.create_task(one(name, index))

        return answers

    async def _describe(
        self, opened: OpenedSession, places: Mapping[str, int]
    ) -> tuple[list[Gpu], list[GpuFault]]:
        """The GPUs, and what fails instead, by index. Raises DriverError: the session is over."""
        found: list[Gpu] = []
        faults: list[GpuFault] = []
        work = partial(describe, self._library, self._table, self._sys_root)

        for name, answer in (await self._each(opened, places, work)).items():
            if isinstance(answer, Gpu):
                found.append(answer)
            elif isinstance(answer, CallFailed):
                # Else it was just released, or the session is over, which is raised below.
                if answer.trouble in {Trouble.LOST, Trouble.RESET}:
                    self._note_reset(name)
                # Of a silent one always the same words, or each look would be news.
                text = NO_ANSWER if answer.trouble is Trouble.SILENT else answer.text
                faults.append(GpuFault(name, text, answer.trouble, places[name]))

        self._session.check(opened)
        return sorted(found, key=by_index), sorted(faults, key=by_index)

    async def _places(self, opened: OpenedSession) -> dict[str, int]:
        """The indexes that may be opened, by name."""
        if not self._table.released:  # else their number tells nothing of the others
            self._table.count = await self._session.call(
                opened, DRIVER, self._library.nvmlDeviceGetCount
            )
        return self._table.places()

    async def _with_links(self, opened: OpenedSession, gpus: list[Gpu]) -> list[Gpu]:
        """The GPUs with the links between them, read once for each set of GPUs in a session."""
        if opened.links.keys() != {gpu.uuid for gpu in gpus}:
            opened.links = {}  # without those that fail, so the next scan reads them again
            places = {str(gpu.uuid): gpu.index for gpu in gpus}
            work = partial(link_row, self._library, self._table, gpus)
            for name, answer in (await self._each(opened, places, work)).items():
                if isinstance(answer, tuple):
                    opened.links[GpuUuid(name)] = answer
                else:
                    log.info("driver.links_unknown", gpu=name, err=str(answer))

        return [linked(gpu, gpus, opened.links) for gpu in gpus]

    # Events.

    async def events(self, opened: Callable[[], None] | None = None) -> AsyncIterator[DriverEvent]:
        """Yield events as they come. GPUs that cannot report are logged; only probes watch them.

        `opened` is called once all other GPUs report, which may take a call's whole deadline.

        Raises DriverMissing, DriverError when the session ends, or the wait fails, as it does for
        all GPUs when one is lost, or does not return.
        """
        session = await self._session.open()
        stream = await self._session.new_stream()
        try:
            await self._session.call(session, DRIVER, stream.create)
            await self._register(session, stream, await self._places(session))
            self._session.check(session)
            stream.begun.set()
            if opened is not None:
                opened()
            while True:
                yield await stream.next()
        finally:
            stream.fail(DriverError("nobody listens any more"))

    @property
    def _stream(self) -> EventStream | None:
        """The stream at which GPUs can be registered."""
        stream = self._session.stream
        return stream if stream is not None and stream.is_open else None

    async def _register(
        self, opened: OpenedSession, stream: EventStream, places: Mapping[str, int]
    ) -> None:
        """Register the GPUs that do not report to the stream yet."""
        wanted = {
            name: index for name, index in places.items() if stream.obstacles.get(name, "new")
        }
        known = stream.known

        def register(name: str, index: int) -> Registered:
            return stream.register(partial(self._table.open, name, index))

        for name, answer in (await self._each(opened, wanted, register)).items():
            if isinstance(answer, GpuError):
                stream.settle(name, answer.text)
            elif not isinstance(answer, DriverError) and stream.known is known:
                stream.settle(*answer)  # the indexes have not changed since it was asked

    def _note_reset(self, gpu: str) -> None:
        """Have a lost or resetting GPU registered again once it answers: a reset forgets it."""
        if self._stream is not None:
            self._stream.obstacles.pop(gpu, None)
