"""Asking a GPU to report its events to a set. Everything here blocks: it runs on its thread."""

import contextlib
import ctypes
import dataclasses
from typing import Any, Final

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


@dataclasses.dataclass(frozen=True, slots=True)
class EventRegistration:
    """What came of asking a GPU for its events. `refused`: why it sends none; empty: it does.

    `era`: that of the stream when it was asked.
    """

    where: int
    uuid: GpuUuid
    refused: str = ""
    era: int = 0


def address(handle: Handle) -> int:
    """What tells two handles of the library apart: where they point to."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def register(
    library: NvmlLibrary,
    handles: Handles,
    event_set: Any,  # noqa: ANN401 -- the library's own
    index: int,
) -> EventRegistration:
    """Have GPU `index` report to `event_set`. Blocks.

    Raises NVMLError, GpuError, ValueError for no text. A GPU that has no events at all is not asked
    again; other failures may pass.
    """
    handle = handles.of_index(index)
    uuid = GpuUuid(text_of(library.nvmlDeviceGetUUID(handle)))
    try:
        mask = library.nvmlDeviceGetSupportedEventTypes(handle) & WANTED
        if mask:  # to register for nothing is an invalid argument
            library.nvmlDeviceRegisterEvents(handle, mask, event_set)
    except library.NVMLError as error:
        if not is_unable(error):
            raise
        return EventRegistration(address(handle), uuid, f"it has no events: {error}")
    if not mask & EVENT_XID:
        return EventRegistration(address(handle), uuid, "it does not report XIDs")
    return EventRegistration(address(handle), uuid)


def free(library: NvmlLibrary, event_set: Any) -> None:  # noqa: ANN401 -- the library's own
    """Give the set back. Blocks."""
    with contextlib.suppress(library.NVMLError):
        library.nvmlEventSetFree(event_set)
