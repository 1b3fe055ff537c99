"""What goes through the door, counted across all servers."""

import asyncio
import contextlib
from collections.abc import Iterator

from agent.kit.cell import Cell
from agent.kit.tally import Durations, Tally

BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Traffic:
    """Open list streams, calls, and how long the ones took that come to an end by themselves."""

    def __init__(self) -> None:
        self.streams: Cell[int] = Cell(0)
        self.calls = Tally(
            "rpc_calls_total",
            "Calls of the kubelet, by what they were answered.",
            ("method", "code"),
        )
        self.durations = Durations(
            "rpc_duration_seconds", "Time from request to answer.", ("method", "code"), BUCKETS
        )

    def ended(self, method: str, code: str, started: float, *, timed: bool) -> None:
        """A call that began at loop time `started` is over."""
        self.calls.add(method, code)
        if timed:
            self.durations.observe(asyncio.get_running_loop().time() - started, method, code)


@contextlib.contextmanager
def counted(cell: Cell[int]) -> Iterator[None]:
    """One more in `cell`, until the block is left."""
    cell.set(cell.value + 1)
    try:
        yield
    finally:
        cell.set(cell.value - 1)
