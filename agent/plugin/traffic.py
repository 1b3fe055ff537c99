"""Counts the kubelet's calls over all servers."""

import asyncio
import contextlib
from collections.abc import Iterator

from agent.kit.cell import Cell
from agent.kit.tally import Durations, Tally

BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Traffic:
    """Open list streams, calls by code, and the durations of unary calls."""

    def __init__(self) -> None:
        self.streams: Cell[int] = Cell(0)
        self.calls = Tally(
            "rpc_calls_total",
            "Calls of the kubelet by gRPC code of the answer.",
            ("method", "code"),
        )
        self.durations = Durations(
            "rpc_duration_seconds", "Seconds from request to answer.", ("method", "code"), BUCKETS
        )

    def ended(self, method: str, code: str, started: float, *, timed: bool) -> None:
        """Count a call that began at loop time `started` and ended now."""
        self.calls.add(method, code)
        if timed:
            self.durations.observe(asyncio.get_running_loop().time() - started, method, code)


@contextlib.contextmanager
def counted(cell: Cell[int]) -> Iterator[None]:
    """Add one to `cell` while the block runs."""
    cell.set(cell.value + 1)
    try:
        yield
    finally:
        cell.set(cell.value - 1)
