"""The programs that a cluster is made of."""

from dataclasses import dataclass
from pathlib import Path

from tests.peers.lab.releases import MODEL, Release


@dataclass(frozen=True, slots=True)
class Programs:
    """`folder` is what tests/peers/build made; `hami_scheduler` is HAMi's own, if there is one.

    `release`: of which release that is, or whose rules the model has.
    """

    folder: Path
    hami_scheduler: Path | None = None
    release: Release = MODEL
