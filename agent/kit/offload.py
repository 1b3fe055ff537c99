"""Blocking work that must not run on the loop."""

from collections.abc import Callable
from typing import Protocol, TypeVar, TypeVarTuple

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Offload(Protocol):
    """Somewhere else to run blocking work, one piece after the other."""

    async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """Run `work(*args)` there and return its result, or raise its error.

        A cancelled caller does not stop work that has begun.
        """
        ...
