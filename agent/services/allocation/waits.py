"""How long Allocates wait for what is outside the agent, and for what."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Final

from agent.kit.tally import Durations

BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Waits:
    """The waits of all Allocates. What is left of an Allocate is the agent's own work."""

    def __init__(self) -> None:
        self.durations = Durations(
            "allocate_wait_seconds",
            "Seconds that an Allocate waited for the kubelet, the runtime, the API server, the "
            "hook path, a container's directory or the state on disk.",
            ("step",),
            BUCKETS,
        )

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Time the block as a wait for that."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            self.durations.observe(loop.time() - began, what)
