"""Tracks the calls of pod admissions, so that a server does not end between two of them."""

import asyncio
import contextlib
from typing import Any, Final

from grpclib.server import Stream

from agent.kit.cell import Cell
from agent.kit.running_time import Lag
from agent.plugin.guard import Serve
from agent.plugin.traffic import counted

PREFERENCE_FOLLOWED: Final = 0.5
"""Seconds after a GetPreferredAllocation in which its Allocate comes; usually 1 ms."""

ALLOCATE_FOLLOWED: Final = 0.1
"""Seconds after an Allocate in which a next container's or pod's comes; usually 8 to 20 ms."""


class AdmissionCalls:
    """The admission calls of one server.

    For each container the kubelet calls GetPreferredAllocation, then Allocate. If the server ends
    between two of these calls, the pod fails.
    """

    def __init__(self) -> None:
        self.open: Cell[int] = Cell(0)
        self._begun: Cell[int] = Cell(0)
        self._expected_until = 0.0
        self._lag = Lag()

    def watched(self, serve: Serve, followed: float) -> Serve:
        """Return `serve`, counted; another call may follow within `followed` seconds of its end."""

        async def watched(stream: Stream[Any, Any]) -> None:
            self._begun.set(self._begun.value + 1)
            with counted(self.open):
                try:
                    await serve(stream)
                finally:
                    self._expected_until = _now() + followed

        return watched

    async def over(self) -> None:
        """Return once no call is open and none is expected."""
        while True:
            await self.open.until(lambda count: count == 0)
            left = self._expected_until - _now()
            if left < 0.001:  # the clock's resolution
                return
            with contextlib.suppress(TimeoutError):
                async with self._lag.within(left):
                    await self._next()

    async def _next(self) -> None:
        """Return once one more call has begun, even if it has ended."""
        known = self._begun.value
        await self._begun.until(lambda count: count != known)


def _now() -> float:
    return asyncio.get_running_loop().time()
