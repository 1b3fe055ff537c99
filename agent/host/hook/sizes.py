"""Measures container directories and the free space of their file system; it changes nothing.

It runs on the thread that removes what was set aside.
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
from agent.host.hook.path import SLICE_ENTRIES, SLICE_SECONDS, open_containers, state_errors
from agent.kit.measure import Measure, MeasureBounds

BOUNDS: Final = MeasureBounds(size=LARGE_MIB * MIB, entries=LARGE_ENTRIES, depth=DEEPEST)


class Sizes:
    """Measures the container directories below `hook`, one at a time."""

    def __init__(self, hook: Path) -> None:
        self._hook = hook
        self._name = ""
        self._measure = Measure(BOUNDS)
        self._walk: Iterator[None] = iter(())

    def measure(self, name: str, anew: bool, now: Callable[[], float]) -> DirectorySize:  # noqa: FBT001 -- for an Offload
        """Count a bounded part of the directory, with `anew` the first. Raises StateError."""
        end = now() + SLICE_SECONDS
        if anew or name != self._name:
            self._name, self._measure = name, Measure(BOUNDS)
            self._walk = self._steps(name, self._measure)
        more = True
        with state_errors(self._hook):
            for _ in range(SLICE_ENTRIES):
                more = next(self._walk, self) is not self
                if not more or now() > end:
                    break
        count = self._measure
        return DirectorySize(count.size, count.entries, count.closed, count.is_deep, more)

    def room(self) -> DiskRoom:
        """The free space and inodes where the directories are. Raises StateError."""
        with state_errors(self._hook):
            system = os.statvfs(self._hook)
            # Each of these can be a mount. A missing one would be made in the one above it.
            with contextlib.suppress(FileNotFoundError):
                system = os.statvfs(self._hook / "vgpu")
                system = os.statvfs(self._hook / "vgpu" / "containers")
        inodes = float(system.f_favail) if system.f_files else math.inf
        return DiskRoom(float(system.f_bavail * system.f_frsize), inodes)

    def _steps(self, name: str, measure: Measure) -> Iterator[None]:
        with contextlib.ExitStack() as open_directories:
            try:
                above = open_containers(self._hook, open_directories)
            except FileNotFoundError:
                return
            yield from measure.steps(name, above)
