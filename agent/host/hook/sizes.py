"""How much lies in container directories, and how much room is left, seen without a change.

All of it happens on the thread that removes what was set aside.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from agent.core.reconcile.measuring import (
    DEEPEST,
    LARGE_ENTRIES,
    LARGE_MIB,
    MIB,
    DirectorySize,
    DiskRoom,
)
from agent.host.hook.path import SLICE_ENTRIES, SLICE_SECONDS, open_containers, told
from agent.kit.measure import Measure, MeasureBounds

BOUNDS: Final = MeasureBounds(size=LARGE_MIB * MIB, entries=LARGE_ENTRIES, depth=DEEPEST)


class Sizes:
    """Container directories below `hook`, and how far the look at one of them has come."""

    def __init__(self, hook: Path) -> None:
        self._hook = hook
        self._name = ""
        self._measure = Measure(BOUNDS)
        self._walk: Iterator[None] = iter(())

    def measure(self, name: str, anew: bool, now: Callable[[], float]) -> DirectorySize:  # noqa: FBT001 -- for an Offload
        """Look at a bounded part of the directory; `anew`: the first one. Raises StateError."""
        end = now() + SLICE_SECONDS
        if anew or name != self._name:
            self._name, self._measure = name, Measure(BOUNDS)
            self._walk = self._steps(name, self._measure)
        more = True
        with told(self._hook):
            for _ in range(SLICE_ENTRIES):
                more = next(self._walk, self) is not self
                if not more or now() > end:
                    break
        found = self._measure
        return DirectorySize(found.size, found.entries, found.closed, found.is_deep, more)

    def room(self) -> DiskRoom:
        """What is left where the directories are. Raises StateError."""
        with told(self._hook):
            found = os.statvfs(self._hook)
            # What is missing is made in what is there, each of which can be a file system.
            with contextlib.suppress(FileNotFoundError):
                found = os.statvfs(self._hook / "vgpu")
                found = os.statvfs(self._hook / "vgpu" / "containers")
        inodes = float(found.f_favail) if found.f_files else math.inf
        return DiskRoom(float(found.f_bavail * found.f_frsize), inodes)

    def _steps(self, name: str, measure: Measure) -> Iterator[None]:
        with contextlib.ExitStack() as open_directories:
            try:
                above = open_containers(self._hook, open_directories)
            except FileNotFoundError:
                return
            yield from measure.steps(name, above)
