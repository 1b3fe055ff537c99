"""Counts what lies below a directory: step by step, through no link, across no mount.

Nothing is changed, and no file is opened. Whoever fills the directory may be at work in it still.
"""

import dataclasses
import errno
import os
import stat
from collections.abc import Iterator
from typing import Final

from agent.kit.dissolve import DIRECTORY

OTHER_NOW: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""What the opening of a directory answers that went, or made room for something else, meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasureBounds:
    """Counting ends as soon as one of them is passed."""

    size: int
    entries: int
    depth: int


class Measure:
    """What was found so far of one directory.

    `size` is what is allocated, in bytes: a sparse file is as large as its blocks, and a file of
    several names is one. `closed` counts directories that we may not look into, and those that
    another file system begins with. `is_deep`: the bound of depth was passed.
    """

    def __init__(self, bounds: MeasureBounds) -> None:
        self._bounds = bounds
        self._linked: set[int] = set()
        self._system = 0
        self.size = 0
        self.entries = 0
        self.closed = 0
        self.is_deep = False

    @property
    def is_beyond(self) -> bool:
        """Whether a bound was passed: there may be more than was counted."""
        bounds = self._bounds
        return self.is_deep or self.size > bounds.size or self.entries > bounds.entries

    def steps(self, name: str, above: int) -> Iterator[None]:
        """Look at `name` in the open directory `above`, one entry a step.

        One that is missing, is none or is a file system of its own has nothing in it. At most two
        descriptors are open for each directory on the way. Raises OSError.
        """
        self._system = os.fstat(above).st_dev
        top = self._open(name, above)
        if top is None:
            return
        try:
            found = os.fstat(top)
            if found.st_dev == self._system:
                self._add(found)
                yield from self._within(top, 1)
        finally:
            os.close(top)

    def _within(self, opened: int, depth: int) -> Iterator[None]:
        is_hidden = False
        with os.scandir(opened) as entries:
            for entry in entries:
                self.entries += 1
                yield
                found = None
                try:
                    found = entry.stat(follow_symlinks=False)
                except PermissionError:
                    is_hidden = True
                except FileNotFoundError:
                    pass
                if found is not None and found.st_dev != self._system:
                    self.closed += 1
                elif found is not None:
                    self._add(found)
                    if stat.S_ISDIR(found.st_mode) and not self.is_beyond:
                        yield from self._nested(entry.name, opened, depth)
                if self.is_beyond:
                    break
        self.closed += is_hidden

    def _nested(self, name: str, above: int, depth: int) -> Iterator[None]:
        if depth == self._bounds.depth:
            self.is_deep = True
            return
        opened = self._open(name, above)
        if opened is None:
            return
        try:
            yield from self._within(opened, depth + 1)
        finally:
            os.close(opened)

    def _open(self, name: str, above: int) -> int | None:
        """The directory, or None: it is closed, or no longer what it was. Raises OSError."""
        try:
            return os.open(name, DIRECTORY, dir_fd=above)
        except PermissionError:
            self.closed += 1
        except OSError as error:
            if error.errno not in OTHER_NOW:
                raise
        return None

    def _add(self, found: os.stat_result) -> None:
        if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
            if found.st_ino in self._linked:
                return
            self._linked.add(found.st_ino)
        self.size += found.st_blocks * 512
