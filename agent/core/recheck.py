"""What came of a question to one GPU that a person asked for."""

import dataclasses

from agent.core.condition import Health
from agent.core.events import Probe
from agent.core.gpu import GpuUuid


@dataclasses.dataclass(frozen=True, slots=True)
class Recheck:
    """One GPU, asked now: its health before and after, and what is `missing` until it is ok.

    `index` is None where it is not known.
    """

    uuid: GpuUuid
    index: int | None
    probe: Probe
    before: Health
    after: Health
    serving: bool
    missing: tuple[str, ...] = ()
