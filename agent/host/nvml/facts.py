"""What the library says of a GPU. Everything here blocks: it runs on the threads of the pool."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

from agent.core.events import Probe, ProbeOutcome
from agent.core.gpu import Gpu, GpuUuid, Link, PciPath
from agent.core.slices import MIB
from agent.host.nvml.library import (
    INVALID_ARGUMENT,
    LINK_TO_SWITCH,
    MOST_LINKS,
    Handle,
    NvmlLibrary,
    code,
    driver_wide,
    is_unable,
    text_of,
    translate,
)

T = TypeVar("T")

_PATHS: Final = {
    0: PciPath.SAME_BOARD,
    10: PciPath.SINGLE_SWITCH,
    20: PciPath.MULTI_SWITCH,
    30: PciPath.HOST_BRIDGE,
    40: PciPath.SAME_CPU,
    50: PciPath.CROSS_CPU,
}
"""NVML's topology levels (nvmlGpuTopologyLevel_t)."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinkRow:
    """One GPU's side of its links: PCI paths and direct NVLinks by peer, NVLinks to switches."""

    paths: Mapping[GpuUuid, PciPath]
    nvlinks: Mapping[str, int]
    """By the PCI bus id of what is at the other end."""
    to_switches: int


def bus_id(text: str) -> str:
    """A bus id of NVML as sysfs writes it: one leading 0000 removed, lower-case.

    Source: HAMi pkg/device-plugin/nvidiadevice/nvinternal/plugin/register.go.
    """
    return text.removeprefix("0000").lower() if len(text) > len("0000:00:00.0") else text.lower()


def numa_node(sys_root: Path, bus: str) -> int | None:
    """The NUMA node of a PCI address, or None when the kernel does not tell."""
    path = sys_root / "bus/pci/devices" / bus / "numa_node"
    try:
        node = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def describe(library: NvmlLibrary, index: int, sys_root: Path) -> Gpu:
    """GPU `index`, without its links. Raises NVMLError."""
    handle = library.nvmlDeviceGetHandleByIndex(index)
    bus = bus_id(text_of(library.nvmlDeviceGetPciInfo(handle).busId))
    memory = _maybe(library, lambda: int(library.nvmlDeviceGetMemoryInfo(handle).total))
    mig = _maybe(library, lambda: library.nvmlDeviceGetMigMode(handle)[0])
    return Gpu(
        uuid=GpuUuid(text_of(library.nvmlDeviceGetUUID(handle))),
        index=index,
        name=text_of(library.nvmlDeviceGetName(handle)),
        memory_mib=None if memory is None else memory // MIB,
        pci=bus,
        numa=numa_node(sys_root, bus),
        minor=_maybe(library, lambda: library.nvmlDeviceGetMinorNumber(handle)),
        mig_enabled=bool(mig),
    )


def probe(library: NvmlLibrary, uuid: GpuUuid) -> Probe:
    """Ask the GPU for a sign of life. Raises DriverError when the driver as a whole fails."""
    try:
        handle = library.nvmlDeviceGetHandleByUUID(uuid)
        _maybe(library, lambda: library.nvmlDeviceGetMemoryInfo(handle))
        rows = _maybe(library, lambda: library.nvmlDeviceGetRemappedRows(handle))
    except library.NVMLError as error:
        whole = driver_wide(error)
        if whole is not None:
            raise whole from error
        lost = getattr(translate(error, uuid), "lost", False)
        outcome = ProbeOutcome.LOST if lost else ProbeOutcome.FAILED
        return Probe(uuid, outcome, str(error))
    if rows is not None and rows[3]:
        return Probe(uuid, ProbeOutcome.FAILED, "a row of its memory could not be remapped")
    return Probe(uuid, ProbeOutcome.PASSED)


def link_row(library: NvmlLibrary, gpu: Gpu, peers: Mapping[GpuUuid, int]) -> LinkRow:
    """What connects `gpu` to the GPUs at those indexes. Raises NVMLError."""
    handle = library.nvmlDeviceGetHandleByIndex(gpu.index)
    paths: dict[GpuUuid, PciPath] = {}
    for peer, index in peers.items():
        other = library.nvmlDeviceGetHandleByIndex(index)
        level = _maybe(library, _ancestor(library, handle, other))
        if level in _PATHS:
            paths[peer] = _PATHS[level]
    direct: dict[str, int] = {}
    to_switches = 0
    for link in _active_links(library, handle):
        kind = _maybe(library, _remote_kind(library, handle, link))
        if kind == LINK_TO_SWITCH:
            to_switches += 1
            continue
        remote = bus_id(text_of(library.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
        direct[remote] = direct.get(remote, 0) + 1
    return LinkRow(paths, direct, to_switches)


def linked(gpu: Gpu, peers: Mapping[GpuUuid, Gpu], rows: Mapping[GpuUuid, LinkRow]) -> Gpu:
    """`gpu` with its links. Through switches two GPUs share as many as both have."""
    row = rows.get(gpu.uuid)
    if row is None:
        return gpu
    links = tuple(
        Link(
            uuid,
            row.paths.get(uuid),
            row.nvlinks.get(peer.pci, 0)
            + (min(row.to_switches, rows[uuid].to_switches) if uuid in rows else 0),
        )
        for uuid, peer in peers.items()
        if uuid != gpu.uuid
    )
    return dataclasses.replace(gpu, links=links)


def _active_links(library: NvmlLibrary, handle: Handle) -> Iterator[int]:
    """The NVLinks that are up; a GPU without any answers that it does not know the question."""
    for link in range(MOST_LINKS):
        try:
            if library.nvmlDeviceGetNvLinkState(handle, link):
                yield link
        except library.NVMLError as error:
            if is_unable(error) or code(error) == INVALID_ARGUMENT:
                return
            raise


def _ancestor(library: NvmlLibrary, one: Handle, other: Handle) -> Callable[[], int]:
    return lambda: library.nvmlDeviceGetTopologyCommonAncestor(one, other)


def _remote_kind(library: NvmlLibrary, handle: Handle, link: int) -> Callable[[], int]:
    return lambda: library.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)


def _maybe(library: NvmlLibrary, ask: Callable[[], T]) -> T | None:
    """The answer, or None where this GPU or this driver cannot tell. Raises other NVMLErrors."""
    try:
        return ask()
    except library.NVMLError as error:
        if is_unable(error):
            return None
        raise
