"""Runs blocking work outside the event loop."""

from collections.abc import Callable
from typing import Protocol, TypeVar, TypeVarTuple

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Offload(Protocol):
    """Runs blocking calls elsewhere, one after the other."""

    async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """Run `work(*args)`; return its result or raise its error.

        Cancelling the caller does not stop work that has begun.
        """
        ...
