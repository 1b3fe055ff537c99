"""Work that an adapter would give to a thread, done on the spot."""

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Inline:
    """An Offload without a thread: for tests on virtual time."""

    async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """Do it now."""
        return work(*args)
