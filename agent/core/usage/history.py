"""What containers used of their GPUs, as it is kept: a few numbers for each round."""

import datetime as dt

import msgspec

from agent.core.usage.use import ContainerUse


class PastGpuUse(msgspec.Struct, frozen=True):
    """The use of one GPU by one container: `memory` in bytes, `sm_percent` of the whole GPU."""

    uuid: str
    memory: int
    sm_percent: int


class PastUse(msgspec.Struct, frozen=True):
    """The use of a container's GPUs at one past time, in the order of ContainerUse.gpus."""

    at: dt.datetime
    gpus: tuple[PastGpuUse, ...]


def numbers_of(use: ContainerUse) -> tuple[int, ...]:
    """Memory and SM percent of each GPU in turn: what a row of the history has after its time."""
    return tuple(number for gpu in use.gpus for number in (gpu.memory.total, gpu.sm_percent))


def past_use(at: dt.datetime, uuids: tuple[str, ...], numbers: tuple[float, ...]) -> PastUse:
    """The inverse of `numbers_of`, for the GPUs `uuids`."""
    pairs = zip(uuids, numbers[::2], numbers[1::2], strict=True)
    return PastUse(at, tuple(PastGpuUse(uuid, int(used), int(sm)) for uuid, used, sm in pairs))
