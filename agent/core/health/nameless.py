"""Finds the GPU behind a fault for which the driver gives only an index and no UUID."""

from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from agent.core.inventory.gpu import GpuFault, GpuUuid, Scan, Trouble

NAMELESS: Final = "index "
"""The prefix of GpuFault.gpu if only the index is known."""


def named(scan: Scan, missing: Collection[GpuUuid]) -> Scan:
    """`scan` with UUIDs for its nameless faults.

    `missing` are GPUs that were known before and that `scan` does not describe. If one GPU is
    missing and one fault is nameless, they are the same GPU. Otherwise each missing GPU may be
    behind any of the faults.
    """
    nameless = [fault for fault in scan.faults if fault.gpu.startswith(NAMELESS)]
    if not nameless or not missing:
        return scan
    if len(nameless) == len(missing) == 1:
        (fault,), (uuid,) = nameless, missing
        index = int(fault.gpu.removeprefix(NAMELESS))
        known = msgspec.structs.replace(fault, gpu=uuid, index=index)
        faults = tuple(known if each is fault else each for each in scan.faults)
    else:
        text = "; ".join(f"it may be {fault.gpu}: {fault.text}" for fault in nameless)
        trouble = doubtful(nameless)
        faults = (*scan.faults, *(GpuFault(uuid, text, trouble) for uuid in sorted(missing)))
    return msgspec.structs.replace(scan, faults=faults)


def doubtful(nameless: Iterable[GpuFault]) -> Trouble:
    """The trouble of a GPU that may be behind any of these faults. It is never LOST."""
    is_silent = all(fault.trouble is Trouble.SILENT for fault in nameless)
    return Trouble.SILENT if is_silent else Trouble.FAILED
