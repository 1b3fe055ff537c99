"""Tells whether the mounts of this process, which a service has of its own, allow writes."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self


def is_read_only(directory: Path) -> bool:
    """Whether the mount that holds the directory refuses writes. Raises OSError."""
    return bool(os.statvfs(directory).f_flag & os.ST_RDONLY)


class WrittenDirectory:
    """Detects that the directory at `path` was removed and can never be written again.

    A sandbox that mounts a directory for writing loses the mount when the directory is removed. A
    new directory in its place is read-only to this process for ever. A file system that turned
    read-only looks the same, except that the directory was not removed. So an open descriptor keeps
    the directory of the last time when it could be written.

    The directory is the kubelet's, on a local disk: calls do not block.
    """

    def __init__(self, path: Path, read_only: Callable[[Path], bool] = is_read_only) -> None:
        self.path = path
        self._read_only = read_only
        self._opened = contextlib.ExitStack()
        self._handle: int | None = None

    def is_lost(self) -> bool:
        """True when it was removed and its successor is read-only to this process."""
        try:
            read_only = self._read_only(self.path)
            if not read_only:
                handle = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                self._opened.close()
                self._opened.callback(os.close, handle)
                self._handle = handle
        except OSError:
            return False
        return read_only and self._handle is not None and os.fstat(self._handle).st_nlink == 0

    def __enter__(self) -> Self:
        self.is_lost()  # it may be removed before anybody looks again
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        self._handle = None
