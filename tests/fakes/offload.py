"""Work that an adapter would give to a thread, done on the spot."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import pytest
from typing_extensions import override

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Inline:
    """An Offload without a thread: for tests on virtual time."""

    async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """Do it now."""
        return work(*args)


class Blocked(Inline):
    """An offload whose thread never comes to what it is given."""

    @override
    async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        await asyncio.Event().wait()
        raise AssertionError


class Hanging(Inline):
    """An offload whose thread never comes back from the file of that name."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Path.stat

        def hang(path: Path) -> os.stat_result:
            if path.name == name:
                raise _HangsError
            return real(path)

        monkeypatch.setattr(Path, "stat", hang)

    @override
    async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        try:
            return work(*args)
        except _HangsError:
            await asyncio.Event().wait()
            raise


class _HangsError(BaseException):
    """In the place of a call that does not return."""
