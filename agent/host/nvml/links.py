"""Reads the links between GPUs. All functions block and run on the GPU's thread."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from agent.core.inventory.gpu import Gpu, GpuUuid, Link, PciPath
from agent.host.nvml.facts import bus_id
from agent.host.nvml.handles import Handles
from agent.host.nvml.library import (
    INVALID_ARGUMENT,
    LINK_TO_SWITCH,
    MOST_LINKS,
    P2P_OK,
    P2P_READ,
    Handle,
    NvmlLibrary,
    code,
    is_unable,
    maybe,
    text_of,
)

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
        level = maybe(library, _ancestor(library, handle, other))
        if level in _PATHS:
            paths[peer] = _PATHS[level]
        status = maybe(library, _peer_to_peer(library, handle, other))
        if status is not None:
            peer_to_peer[peer] = status == P2P_OK
    direct: dict[str, int] = {}
    to_switches = 0
    for link in _active_links(library, handle):
        kind = maybe(library, _remote_kind(library, handle, link))
        if kind == LINK_TO_SWITCH:
            to_switches += 1
            continue
        address = maybe(library, _remote_address(library, handle, link))
        if address is not None:
            remote = bus_id(text_of(address))
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


def _ancestor(library: NvmlLibrary, one: Handle, other: Handle) -> Callable[[], int]:
    return lambda: library.nvmlDeviceGetTopologyCommonAncestor(one, other)


def _peer_to_peer(library: NvmlLibrary, one: Handle, other: Handle) -> Callable[[], int]:
    return lambda: library.nvmlDeviceGetP2PStatus(one, other, P2P_READ)


def _remote_kind(library: NvmlLibrary, handle: Handle, link: int) -> Callable[[], int]:
    return lambda: library.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)


def _remote_address(library: NvmlLibrary, handle: Handle, link: int) -> Callable[[], str | bytes]:
    return lambda: library.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
