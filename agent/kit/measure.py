"""Counts the content of a directory in small steps. It follows no link and crosses no mount.

It changes nothing and opens no file. Another process may still write into the directory.
"""

import errno
import os
import stat
from collections.abc import Iterator
from typing import Final

import msgspec

from agent.kit.dissolve import DIRECTORY

OTHER_NOW: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""The errors of opening a directory that was meanwhile removed or replaced."""


class MeasureBounds(msgspec.Struct, frozen=True):
    """Where counting ends: bytes, entries, or nested directories beyond these."""

    size: int
    entries: int
    depth: int


class Measure:
    """The count of one directory so far.

    `size` is in allocated bytes: a sparse file counts its blocks, a file with several names counts
    once. `closed` counts directories that may not be read and mount points. `is_deep`: the bound of
    depth was passed.
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
        """Whether a bound was passed: there may be more than the count says."""
        bounds = self._bounds
        return self.is_deep or self.size > bounds.size or self.entries > bounds.entries

    def steps(self, name: str, above: int) -> Iterator[None]:
        """Count `name` in the open directory `above`, one entry a step.

        A missing one, a file and a mount point count as empty. At most two descriptors are open for
        each level of depth. Raises OSError.
        """
        self._system = os.fstat(above).st_dev
        top = self._open(name, above)
        if top is None:
            return
        try:
            status = os.fstat(top)
            if status.st_dev == self._system:
                self._add(status)
                yield from self._within(top, 1)
        finally:
            os.close(top)

    def _within(self, opened: int, depth: int) -> Iterator[None]:
        is_hidden = False
        with os.scandir(opened) as entries:
            for entry in entries:
                self.entries += 1
                yield
                status = None
                try:
                    status = entry.stat(follow_symlinks=False)
                except PermissionError:
                    is_hidden = True
                except FileNotFoundError:
                    pass
                if status is not None and status.st_dev != self._system:
                    self.closed += 1
                elif status is not None:
                    self._add(status)
                    if stat.S_ISDIR(status.st_mode) and not self.is_beyond:
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
        """Open the directory; None when it may not be read, or is gone. Raises OSError."""
        try:
            return os.open(name, DIRECTORY, dir_fd=above)
        except PermissionError:
            self.closed += 1
        except OSError as error:
            if error.errno not in OTHER_NOW:
                raise
        return None

    def _add(self, status: os.stat_result) -> None:
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            if status.st_ino in self._linked:
                return
            self._linked.add(status.st_ino)
        self.size += status.st_blocks * 512
