"""Registers a GPU with an event set. All functions block and run on the GPU's thread."""

import contextlib
import ctypes
from typing import Any, Final

import msgspec

from agent.core.inventory.gpu import GpuUuid
from agent.host.nvml.handles import Handles
from agent.host.nvml.library import (
    EVENT_ECC_DOUBLE,
    EVENT_ECC_SINGLE,
    EVENT_MIG_CHANGE,
    EVENT_POWER_SOURCE,
    EVENT_XID,
    Handle,
    NvmlLibrary,
    is_unable,
    text_of,
)

WANTED: Final = (
    EVENT_XID | EVENT_ECC_DOUBLE | EVENT_ECC_SINGLE | EVENT_POWER_SOURCE | EVENT_MIG_CHANGE
)


class EventRegistration(msgspec.Struct, frozen=True):
    """The answer of a GPU to its registration. `refused`: why it sends no events; empty: it does.

    `where` is its handle's address, `era` the stream's era at the call.
    """

    where: int
    uuid: GpuUuid
    refused: str = ""
    era: int = 0


def address(handle: Handle) -> int:
    """The address that a handle points to, which identifies the GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def register(
    library: NvmlLibrary,
    handles: Handles,
    event_set: Any,  # noqa: ANN401 -- the library's own
    index: int,
) -> EventRegistration:
    """Register GPU `index` with `event_set`. Blocks.

    A GPU without events is an answer (`refused`). Raises NVMLError, GpuError, ValueError
    (undecodable text): these failures may pass.
    """
    handle = handles.of_index(index)
    uuid = GpuUuid(text_of(library.nvmlDeviceGetUUID(handle)))
    try:
        mask = library.nvmlDeviceGetSupportedEventTypes(handle) & WANTED
        if mask:  # an empty mask is an invalid argument
            library.nvmlDeviceRegisterEvents(handle, mask, event_set)
    except library.NVMLError as error:
        if not is_unable(error):
            raise
        return EventRegistration(address(handle), uuid, f"it has no events: {error}")
    if not mask & EVENT_XID:
        return EventRegistration(address(handle), uuid, "it does not report XIDs")
    return EventRegistration(address(handle), uuid)


def free(library: NvmlLibrary, event_set: Any) -> None:  # noqa: ANN401 -- the library's own
    """Free the set. Blocks."""
    with contextlib.suppress(library.NVMLError):
        library.nvmlEventSetFree(event_set)
