"""What came of a question to one GPU that a person asked for."""

import dataclasses
from typing import Final

from agent.core.condition import Health
from agent.core.events import Probe
from agent.core.gpu import NO_INDEX, GpuUuid
from agent.core.inventory import Inventory, SharedGpu

WITHHELD: Final = "no slice of this node is on offer: `/readyz?verbose` says why at `offer`"


@dataclasses.dataclass(frozen=True, slots=True)
class Recheck:
    """One GPU, asked now: its health before and after, and what is `missing` until it is served.

    `index` is None where it is not known. `serving`: new containers may be given it.
    """

    uuid: GpuUuid
    index: int | None
    probe: Probe
    before: Health
    after: Health
    serving: bool
    missing: tuple[str, ...] = ()


def rechecked(
    gpu: SharedGpu, probe: Probe, before: Health, missing: tuple[str, ...], inventory: Inventory
) -> Recheck:
    """What came of it. `missing`: until it is ok; a GPU that is well may be kept out all the same.

    `gpu`: as it is now, whether or not it is in `inventory` any more.
    """
    kept_out = [f"it {gpu.plight}"] if gpu.health.serving and not gpu.present else []
    withheld = [WITHHELD] if gpu.serving and inventory.withheld else []
    return Recheck(
        gpu.uuid,
        None if gpu.gpu.index == NO_INDEX else gpu.gpu.index,
        probe,
        before,
        gpu.health,
        serving=inventory.offers(gpu),
        missing=(*missing, *kept_out, *withheld),
    )
