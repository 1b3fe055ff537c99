"""The programs that a cluster is made of."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Programs:
    """`folder` is what tests/peers/build made; `hami_scheduler` is HAMi's own, if there is one."""

    folder: Path
    hami_scheduler: Path | None = None
