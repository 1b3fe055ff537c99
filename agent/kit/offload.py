"""Work outside the event loop: the Offload port, and the names of threads."""

import contextlib
from collections.abc import Callable
from pathlib import Path
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


def show_thread_name(name: str) -> None:
    """Name the calling thread in /proc and `top -H`: Python before 3.14 keeps names to itself.

    The kernel keeps 15 bytes. Without /proc nothing shows.
    """
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name, encoding="utf-8")
