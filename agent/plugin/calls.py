"""The calls of an admission: which are being answered, and which are still to come."""

import asyncio
import contextlib
from typing import Any, Final

from grpclib.server import Stream

from agent.kit.cell import Cell
from agent.plugin.guard import Serve
from agent.plugin.traffic import counted

PREFERENCE_FOLLOWED: Final = 0.5
"""Seconds in which the Allocate comes that a preference was asked for: a millisecond, usually."""

ALLOCATE_FOLLOWED: Final = 0.1
"""Seconds in which a pod's next container comes, or the next of several pods: 8 to 20 ms."""


class AdmissionCalls:
    """The admission calls of one server.

    The kubelet asks for a preference, then for the allocation, container by container. A server
    that ends between two of them fails the pod.
    """

    def __init__(self) -> None:
        self.open: Cell[int] = Cell(0)
        self._begun: Cell[int] = Cell(0)
        self._expected_until = 0.0

    def watched(self, serve: Serve, followed: float) -> Serve:
        """`serve`, counted; another call may follow its end within `followed` seconds."""

        async def watched(stream: Stream[Any, Any]) -> None:
            self._begun.set(self._begun.value + 1)
            with counted(self.open):
                try:
                    await serve(stream)
                finally:
                    self._expected_until = _now() + followed

        return watched

    async def over(self) -> None:
        """Return once no call is being answered and none is to come."""
        while True:
            await self.open.until(lambda count: count == 0)
            left = self._expected_until - _now()
            if left < 0.001:  # a clock may not resolve less
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._next()

    async def _next(self) -> None:
        """Return once one more call has begun; it may be over already."""
        known = self._begun.value
        await self._begun.until(lambda count: count != known)


def _now() -> float:
    return asyncio.get_running_loop().time()
