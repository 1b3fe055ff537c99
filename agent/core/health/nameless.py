"""Which GPU is behind a fault that has no name: one that never told its UUID to this process."""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Final

from agent.core.inventory.gpu import GpuFault, GpuUuid, Scan, Trouble

NAMELESS: Final = "index "
"""Begins what a driver calls a GPU of which it knows nothing else."""


def named(scan: Scan, missing: Collection[GpuUuid]) -> Scan:
    """`scan` with the names of those `missing`, which were known before and are not described.

    One GPU is missing and one fault is nameless: they are the same. Else each of them may be any.
    """
    nameless = [fault for fault in scan.faults if fault.gpu.startswith(NAMELESS)]
    if not nameless or not missing:
        return scan
    if len(nameless) == len(missing) == 1:
        (fault,), (uuid,) = nameless, missing
        index = int(fault.gpu.removeprefix(NAMELESS))
        known = dataclasses.replace(fault, gpu=uuid, index=index)
        faults = tuple(known if one is fault else one for one in scan.faults)
    else:
        text = "; ".join(f"it may be {fault.gpu}: {fault.text}" for fault in nameless)
        trouble = doubtful(nameless)
        faults = (*scan.faults, *(GpuFault(uuid, text, trouble) for uuid in sorted(missing)))
    return dataclasses.replace(scan, faults=faults)


def doubtful(nameless: Iterable[GpuFault]) -> Trouble:
    """The trouble of a GPU that may be any of these: none of them is lost for certain."""
    is_silent = all(fault.trouble is Trouble.SILENT for fault in nameless)
    return Trouble.SILENT if is_silent else Trouble.FAILED
