"""The driver by NVML: scan, probe, sample, events and release."""

import asyncio
import ctypes
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import msgspec
import structlog

from agent.errors import DriverError, DriverMissing, GpuError
from agent.gpu import nvml
from agent.gpu.events import EventStreams
from agent.gpu.handles import RELEASED, UNPLACED, Handles, Indexes
from agent.gpu.nvml import (
    DRIVER,
    ECC_CORRECTED,
    ECC_IN_LIFE,
    ECC_SINCE_LOAD,
    ECC_UNCORRECTED,
    FABRIC_COMPLETED,
    FABRIC_IN_PROGRESS,
    FABRIC_NOT_STARTED,
    FIELD_RECOVERY_ACTION,
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    LINK_TO_SWITCH,
    MEMORY_V2,
    MOST_LINKS,
    NO_ANSWER,
    P2P_OK,
    P2P_READ,
    RESET_REQUIRED,
    RETIRED_FOR_DOUBLE_BIT,
    RETIRED_FOR_SINGLE_BIT,
    TEMPERATURE_GPU,
    FabricInfo,
    Handle,
    NvmlLibrary,
    NvmlSession,
    OpenedSession,
    code,
    driver_wide,
    is_unable,
    maybe,
    text_of,
    translate,
)
from agent.model import (
    MIB,
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
)

# Describes a GPU by the library's answers. All functions block and run on the GPU's thread.


def bus_id(text: str) -> str:
    """Convert a PCI bus id of NVML to the form of sysfs: at least four digits of the domain.

    Domains above ffff are virtual (VMD, some clouds). Other text stays as it is.
    """
    domain, _, rest = text.lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}" if rest else text.lower()


def numa_node(sys_root: Path, bus: str) -> int | None:
    """The NUMA node of a PCI address, or None when the kernel gives none."""
    path = sys_root / "bus/pci/devices" / bus / "numa_node"
    try:
        node = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def describe(library: NvmlLibrary, handles: Handles, index: int, sys_root: Path) -> Gpu:
    """Describe GPU `index`, without its links. Raises NVMLError, GpuError when it is released."""
    handle = handles.of_index(index)
    bus = bus_id(text_of(library.nvmlDeviceGetPciInfo(handle).busId))
    mig = maybe(library, library.nvmlDeviceGetMigMode, handle)
    # A GPU with the host's memory does not report it.
    memory = maybe(library, library.nvmlDeviceGetMemoryInfo, handle)
    return Gpu(
        uuid=GpuUuid(text_of(library.nvmlDeviceGetUUID(handle))),
        index=index,
        name=text_of(library.nvmlDeviceGetName(handle)),
        memory_mib=None if memory is None else int(memory.total) // MIB,
        pci=bus,
        numa=numa_node(sys_root, bus),
        minor=maybe(library, library.nvmlDeviceGetMinorNumber, handle),
        mig_enabled=mig is not None and bool(mig[0]),
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

_PATHS: Final = {
    0: PciPath.SAME_BOARD,
    10: PciPath.SINGLE_SWITCH,
    20: PciPath.MULTI_SWITCH,
    30: PciPath.HOST_BRIDGE,
    40: PciPath.SAME_CPU,
    50: PciPath.CROSS_CPU,
}
"""NVML's topology levels (nvmlGpuTopologyLevel_t)."""


class LinkRow(msgspec.Struct, frozen=True):
    """One GPU's side of its links: the paths to each peer, and its NVLinks."""

    paths: Mapping[GpuUuid, PciPath]
    peer_to_peer: Mapping[GpuUuid, bool]
    nvlinks: Mapping[str, int]
    """How many NVLinks lead to each PCI bus id."""
    to_switches: int
    """How many NVLinks lead to switches."""


def link_row(
    library: NvmlLibrary, handles: Handles, gpu: Gpu, peers: Mapping[GpuUuid, int]
) -> LinkRow:
    """Read what connects `gpu` to its peers at those indexes. Raises NVMLError, GpuError."""
    handle = handles.of_index(gpu.index)
    paths: dict[GpuUuid, PciPath] = {}
    peer_to_peer: dict[GpuUuid, bool] = {}
    for peer, index in peers.items():
        other = handles.of_index(index)
        level = maybe(library, library.nvmlDeviceGetTopologyCommonAncestor, handle, other)
        if level in _PATHS:
            paths[peer] = _PATHS[level]
        status = maybe(library, library.nvmlDeviceGetP2PStatus, handle, other, P2P_READ)
        if status is not None:
            peer_to_peer[peer] = status == P2P_OK
    direct: dict[str, int] = {}
    to_switches = 0
    for link in _active_links(library, handle):
        kind = maybe(library, library.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == LINK_TO_SWITCH:
            to_switches += 1
            continue
        info = maybe(library, library.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        if info is not None:
            remote = bus_id(text_of(info.busId))
            direct[remote] = direct.get(remote, 0) + 1
    return LinkRow(paths, peer_to_peer, direct, to_switches)


def linked(gpu: Gpu, peers: Mapping[GpuUuid, Gpu], rows: Mapping[GpuUuid, LinkRow]) -> Gpu:
    """Return `gpu` with its links. Over switches two GPUs share the smaller number of NVLinks."""
    row = rows.get(gpu.uuid)
    if row is None:
        return gpu
    links = tuple(
        Link(
            uuid,
            row.paths.get(uuid),
            row.nvlinks.get(peer.pci, 0)
            + (min(row.to_switches, rows[uuid].to_switches) if uuid in rows else 0),
            row.peer_to_peer.get(uuid),
        )
        for uuid, peer in peers.items()
        if uuid != gpu.uuid
    )
    return msgspec.structs.replace(gpu, links=links)


def _active_links(library: NvmlLibrary, handle: Handle) -> Iterator[int]:
    """The NVLinks that are up; a GPU without NVLinks answers that it is unable."""
    for link in range(MOST_LINKS):
        try:
            if library.nvmlDeviceGetNvLinkState(handle, link):
                yield link
        except library.NVMLError as error:
            if is_unable(error) or code(error) == INVALID_ARGUMENT:
                return
            raise


# Probes and samples a GPU. All functions block and run on the GPU's thread.

P = ParamSpec("P")
T = TypeVar("T")

_RECOVERY: Final = {
    0: RecoveryAction.NONE,
    1: RecoveryAction.GPU_RESET,
    2: RecoveryAction.NODE_REBOOT,
    3: RecoveryAction.DRAIN_P2P,
    4: RecoveryAction.DRAIN_AND_RESET,
    5: RecoveryAction.RECOVER_IMEX_DOMAIN,
    6: RecoveryAction.BUS_RESET,
    7: RecoveryAction.SYSTEM_REBOOT,
}
"""nvmlDeviceGpuRecoveryAction_t."""

_FABRIC: Final = {
    FABRIC_NOT_STARTED: FabricState.NOT_STARTED,
    FABRIC_IN_PROGRESS: FabricState.IN_PROGRESS,
}

_GRAVE: Final = frozenset({GPU_IS_LOST, RESET_REQUIRED})


def probe_of(library: NvmlLibrary, handles: Handles, uuid: GpuUuid) -> Probe:
    """Probe the GPU. Raises GpuError (released), DriverError (the whole driver fails)."""
    try:
        handle = handles.of_uuid(uuid)
        maybe(library, library.nvmlDeviceGetMemoryInfo, handle)
        signs = signs_of(library, handle)
    except library.NVMLError as error:
        driver_error = driver_wide(error)
        if driver_error is not None:
            raise driver_error from error
        lost = getattr(translate(error, uuid), "lost", False)
        unanswered = ProbeOutcome.REFUSED if code(error) == RESET_REQUIRED else ProbeOutcome.FAILED
        return Probe(uuid, ProbeOutcome.LOST if lost else unanswered, str(error))
    if signs.rows_failed:
        text = "a row of its memory could not be remapped"
        return Probe(uuid, ProbeOutcome.FAILED, text, signs)
    return Probe(uuid, ProbeOutcome.PASSED, signs=signs)


def signs_of(library: NvmlLibrary, handle: Handle) -> GpuSigns:
    """Read the signs of the GPU. Raises NVMLError when the GPU or the driver is gone."""
    rows = _sign(library, library.nvmlDeviceGetRemappedRows, handle)
    pending = _sign(library, library.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    return GpuSigns(
        rows_pending=None if rows is None else bool(rows[2]),
        rows_failed=None if rows is None else bool(rows[3]),
        rows_remapped=None if rows is None else rows[0] + rows[1],
        pages_pending=None if pending is None else bool(pending),
        pages_retired=_sign(library, _retired, library, handle),
        ecc_corrected=_errors(library, handle, ECC_CORRECTED, ECC_SINCE_LOAD),
        ecc_uncorrected=_errors(library, handle, ECC_UNCORRECTED, ECC_SINCE_LOAD),
        recovery=_sign(library, _recovery, library, handle),
        fabric=_sign(library, _fabric, library, handle),
    )


def sample_of(library: NvmlLibrary, handles: Handles, uuid: GpuUuid) -> GpuSample:
    """Read how much the GPU is used. Raises NVMLError, GpuError."""
    handle = handles.of_uuid(uuid)
    rates = _sign(library, library.nvmlDeviceGetUtilizationRates, handle)
    # The first form counts what the driver reserves as used; drivers before 510 have no other.
    memory = _sign(library, library.nvmlDeviceGetMemoryInfo, handle, MEMORY_V2)
    if memory is None:
        memory = _sign(library, library.nvmlDeviceGetMemoryInfo, handle)
    return GpuSample(
        uuid,
        gpu_percent=None if rates is None else int(rates.gpu),
        memory_percent=None if rates is None else int(rates.memory),
        used_mib=None if memory is None else int(memory.used) // MIB,
        reserved_mib=int(getattr(memory, "reserved", 0)) // MIB,
        celsius=_sign(library, library.nvmlDeviceGetTemperature, handle, TEMPERATURE_GPU),
        milliwatts=_sign(library, library.nvmlDeviceGetPowerUsage, handle),
        ecc_corrected=_errors(library, handle, ECC_CORRECTED, ECC_IN_LIFE),
        ecc_uncorrected=_errors(library, handle, ECC_UNCORRECTED, ECC_IN_LIFE),
    )


def _retired(library: NvmlLibrary, handle: Handle) -> int:
    causes = (RETIRED_FOR_SINGLE_BIT, RETIRED_FOR_DOUBLE_BIT)
    return sum(len(library.nvmlDeviceGetRetiredPages(handle, cause)) for cause in causes)


def _errors(library: NvmlLibrary, handle: Handle, kind: int, span: int) -> int | None:
    return _sign(library, library.nvmlDeviceGetTotalEccErrors, handle, kind, span)


def _recovery(library: NvmlLibrary, handle: Handle) -> RecoveryAction | None:
    """Raises NVMLError, also for the field's own error: a driver before 570 has no such field."""
    value = library.nvmlDeviceGetFieldValues(handle, [FIELD_RECOVERY_ACTION])[0]
    if value.nvmlReturn:
        raise library.NVMLError(value.nvmlReturn)
    return _RECOVERY.get(int(value.value.uiVal), RecoveryAction.OTHER)


def _fabric(library: NvmlLibrary, handle: Handle) -> FabricState | None:
    info = FabricInfo()
    library.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    if info.state == FABRIC_COMPLETED:
        return FabricState.FAILED if info.status else FabricState.COMPLETED
    return _FABRIC.get(info.state)


def _sign(library: NvmlLibrary, ask: Callable[P, T], *args: P.args, **more: P.kwargs) -> T | None:
    """Return the answer, or None if the call fails: a sign alone proves no fault.

    Raises NVMLError when the GPU is lost or must be reset, or the driver is gone.
    """
    try:
        return ask(*args, **more)
    except library.NVMLError as error:
        if code(error) in _GRAVE or driver_wide(error) is not None:
            raise
        return None


# The Driver port over NVML: scans, probes, samples and events.

CALL_DEADLINE: Final = 2.0
REMOVED_AFTER: Final = 60.0
"""Seconds without the library's file until it counts as removed."""

log = structlog.get_logger(__name__)


class NvmlDriver:
    """Implements agent.ports.Driver.

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
        self._find: Callable[[], Path | None] = lambda: path or nvml.library_below(driver_root)
        self._now = now
        self._library = library
        self._sys_root = sys_root
        self._session = NvmlSession(
            library,
            self._find,
            sys_root,
            deadline,
            ended=self._on_session_end,
            quiet=self._quiet,
            back=self._on_back,
        )
        self._indexes = Indexes()
        self._links: Mapping[GpuUuid, LinkRow] | None = None
        self._renewed = False
        """A new session was begun because all GPUs failed, and none has answered since."""
        self._there_at = self._now()
        """When a look found the library's file last."""
        self._slow: set[str] = set()
        """The GPUs that did not answer in time when they were last described."""
        self._described: frozenset[str] = frozenset()
        """The addresses of all GPUs that were ever described."""
        self._handles = Handles(library)
        self._streams = EventStreams(library, self._session, self._indexes, self._handles)

    async def scan(self) -> Scan:
        """Describe all GPUs. Raises DriverMissing, DriverError."""
        opened = await self._session.open()
        if self._handles.released:
            return await self._scan_others(opened)
        count = await self._session.whole(opened, self._library.nvmlDeviceGetCount)
        if not self._indexes.counted(count):
            self._streams.forget()
        found, troubled = await self._describe(opened, range(count))
        self._renewed = self._renewed and not found
        if not self._indexes.seen({index: gpu.uuid for index, gpu in found.items()}):
            self._streams.forget()
        faults = self._indexes.named(troubled)
        self._described |= {gpu.pci for gpu in found.values()}
        if not faults:  # else one of these may be the GPU that is not described
            unlisted = partial(gpus_not_listed, self._sys_root, self._described)
            faults = await self._session.whole(opened, unlisted)
        uuids = [gpu.uuid for gpu in found.values()]
        self._session.threads.keep({DRIVER, *uuids, *(fault.gpu for fault in faults)})
        peers = {found[index].uuid: found[index] for index in sorted(found)}
        rows = await self._link_rows(opened, peers)
        silent = [fault.gpu for fault in faults if not fault.lost]
        await self._streams.follow(opened, sorted(found), peers.keys(), silent)
        self._session.check(opened)
        gpus = tuple(linked(gpu, peers, rows) for gpu in peers.values())
        self._handles.seen(gpus, faults)
        return Scan(opened.driver_version, gpus, faults, opened.library_version)

    async def _scan_others(self, opened: OpenedSession) -> Scan:
        """Describe the GPUs that are not released; their known addresses and links stay."""
        found, troubled = await self._describe(opened, self._handles.open_to(0))
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
        await self._streams.follow(opened, sorted(found), [gpu.uuid for gpu in gpus], [])
        self._session.check(opened)
        return Scan(opened.driver_version, gpus, tuple(faults), opened.library_version)

    async def probe(self, uuid: GpuUuid) -> Probe:
        """Probe one GPU. Raises DriverMissing, DriverError."""
        opened = await self._session.open()
        try:
            work = partial(probe_of, self._library, self._handles, uuid)
            probe = await self._session.call(opened, uuid, work)
        except TimeoutError as error:
            probe = Probe(uuid, ProbeOutcome.SILENT, str(error) or NO_ANSWER)
        except DriverError as error:
            self._session.end(error, opened)
            raise
        self._renewed = self._renewed and probe.outcome is not ProbeOutcome.PASSED
        await self._streams.hear_again(opened, probe)
        return msgspec.structs.replace(probe, unmonitored=self._streams.obstacle(uuid))

    async def sample(self, uuid: GpuUuid) -> GpuSample:
        """Read how much one GPU is used. Raises GpuError, DriverMissing, DriverError."""
        opened = await self._session.open()
        try:
            work = partial(sample_of, self._library, self._handles, uuid)
            return await self._session.call(opened, uuid, work)
        except TimeoutError as error:
            raise GpuError(uuid, str(error) or NO_ANSWER) from error
        except self._library.NVMLError as error:  # it says nothing about the GPU's health
            translated = nvml.translate(error, uuid)
            if isinstance(translated, DriverError):
                self._session.end(translated, opened)
            raise translated from error

    def events(self, opened: Callable[[], None] | None = None) -> AsyncIterator[DriverEvent]:
        """Yield events as they come. GPUs that cannot report are logged; only probes watch them.

        `opened` is called once all other GPUs report, which may take a call's whole deadline.

        Raises DriverMissing, DriverError when the session ends, or the wait does not return.
        """
        return self._streams.events(opened)

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
        self._streams.unhear(uuid)
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

    def _on_session_end(self, error: DriverError) -> None:
        self._links = None
        self._streams.fail(error)

    async def _quiet(self) -> bool:
        return await self._streams.quiet()

    def _on_back(self, name: str) -> None:
        """Note that a stuck GPU answers; if it was not described, ask for a scan."""
        self._streams.back(name)
        if name in self._slow:
            self._slow.discard(name)
            self._streams.changed()

    async def _describe(
        self, opened: OpenedSession, indexes: Iterable[int]
    ) -> tuple[dict[int, Gpu], dict[int, GpuFault]]:
        """The GPUs at those indexes, and what fails instead. Raises DriverError: it is over."""
        found: dict[int, Gpu] = {}
        faults: dict[int, GpuFault] = {}

        async def one(index: int, name: str) -> None:
            work = partial(describe, self._library, self._handles, index, self._sys_root)
            try:
                found[index] = await self._session.call(opened, name, work)
                self._slow.discard(name)
            except TimeoutError:
                self._slow.add(name)
                faults[index] = GpuFault(name, NO_ANSWER, Trouble.SILENT, index)
            except (DriverError, GpuError) as error:
                # The session is over, which is raised below.
                faults[index] = GpuFault(name, str(error), index=index)
            except (self._library.NVMLError, ValueError) as error:
                # ValueError: the binding could not decode a text.
                translated = nvml.translate(error, name)
                if isinstance(translated, DriverError):
                    self._session.end(translated, opened)
                trouble = nvml.trouble(error)
                if trouble in {Trouble.LOST, Trouble.RESET}:
                    self._streams.unhear(name)
                faults[index] = GpuFault(name, str(error), trouble, index)

        async with asyncio.TaskGroup() as tasks:
            for index in indexes:
                tasks.create_task(one(index, self._indexes.name(index)))
        self._session.check(opened)
        return found, faults

    async def _link_rows(
        self, opened: OpenedSession, peers: Mapping[GpuUuid, Gpu]
    ) -> Mapping[GpuUuid, LinkRow]:
        """The links between the GPUs, which are read once for each set of GPUs."""
        if self._links is not None and self._links.keys() == peers.keys():
            return self._links
        rows: dict[GpuUuid, LinkRow] = {}

        async def read(gpu: Gpu) -> None:
            others = {peer: other.index for peer, other in peers.items() if peer != gpu.uuid}
            work = partial(link_row, self._library, self._handles, gpu, others)
            try:
                rows[gpu.uuid] = await self._session.call(opened, gpu.uuid, work)
            except (TimeoutError, DriverError, self._library.NVMLError, ValueError) as error:
                log.info("driver.links_unknown", gpu=gpu.uuid, err=str(error) or NO_ANSWER)

        async with asyncio.TaskGroup() as tasks:
            for gpu in peers.values():
                tasks.create_task(read(gpu))
        if rows.keys() == peers.keys():
            self._links = rows
        return rows
