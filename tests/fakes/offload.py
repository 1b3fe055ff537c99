"""Work that an adapter would give to a thread, done on the spot."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from typing_extensions import override

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Inline:
    """An Offload without a thread: for tests on virtual time."""

    async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """Do it now."""
        return work(*args)


class Hanging(Inline):
    """An offload on which whatever is asked of the file of that name never comes back."""

    def __init__(self, name: str) -> None:
        self.name = name

    @override
    async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        if any(isinstance(one, Path) and one.name == self.name for one in args):
            await asyncio.Event().wait()
        return await super().call(work, *args)
