"""Measures the container directories when somebody asks; changes nothing, follows no link.

A container may do anything in its directory meanwhile. So counting opens each directory from the
one above it, crosses no mount, and ends beyond what HAMi-core could ever need.
"""

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent.host.hook.path import LISTED, NAME, open_containers
from agent.kit.dissolve import DIRECTORY

BYTES: Final = 256 * 2**20
ENTRIES: Final = 10_000
DEPTH: Final = 16
"""HAMi-core needs a few files of about 2 MiB, and makes no directory. Counting ends here."""

_OTHER_NOW: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""The errors of opening a directory that was meanwhile removed or replaced."""


class DirectorySize:
    """The count of one directory.

    `size` is in allocated bytes: a sparse file counts its blocks, a file with several names counts
    once. `closed` counts directories that may not be read and mount points.
    """

    def __init__(self) -> None:
        self.size = 0
        self.entries = 0
        self.closed = 0
        self._is_deep = False
        self._linked: set[int] = set()

    @property
    def is_beyond(self) -> bool:
        """Whether counting ended early: there may be more than the count says."""
        return self._is_deep or self.size > BYTES or self.entries > ENTRIES

    def count(self, name: str, above: int, depth: int = 0) -> None:
        """Add the directory `name` in the open directory `above`. Raises OSError.

        At most two descriptors are open for each level of depth.
        """
        if depth == DEPTH:
            self._is_deep = True
            return
        try:
            opened = os.open(name, DIRECTORY, dir_fd=above)
        except PermissionError:
            self.closed += 1
            return
        except OSError as error:
            if error.errno not in _OTHER_NOW:
                raise
            return
        try:
            status = os.fstat(opened)
            if status.st_dev != os.fstat(above).st_dev:
                # A mount in it is told; its own file system fills no other container's.
                self.closed += depth > 0
                return
            self.size += status.st_blocks * 512
            self._count_entries(opened, depth)
        finally:
            os.close(opened)

    def _count_entries(self, opened: int, depth: int) -> None:
        is_hidden = False
        with os.scandir(opened) as entries:
            for entry in entries:
                self.entries += 1
                if self.is_beyond:
                    break
                try:
                    status = entry.stat(follow_symlinks=False)
                except PermissionError:
                    is_hidden = True
                    continue
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    self.count(entry.name, opened, depth + 1)
                elif status.st_nlink == 1 or status.st_ino not in self._linked:
                    self._linked |= {status.st_ino} if status.st_nlink > 1 else set()
                    self.size += status.st_blocks * 512
        self.closed += is_hidden


def directory_sizes(hook: Path) -> Mapping[str, DirectorySize]:
    """The size of each container directory below `hook`, by its name. Raises OSError."""
    found = dict[str, DirectorySize]()
    with contextlib.ExitStack() as open_directories:
        above = open_containers(hook, open_directories)
        with os.scandir(above) as entries:
            names = [one.name for one in itertools.islice(entries, LISTED)]
        for name in filter(NAME.fullmatch, names):
            found[name] = DirectorySize()
            found[name].count(name, above)
    return found
