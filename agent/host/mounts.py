"""What the mounts of this process allow; a service sees the host through mounts of its own."""

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self


def is_read_only(directory: Path) -> bool:
    """Whether the mount that the directory is seen through refuses writes. Raises OSError."""
    return bool(os.statvfs(directory).f_flag & os.ST_RDONLY)


class WrittenDirectory:
    """The directory at `path`, remembered as it was when it could be written.

    A sandbox that mounts a directory for writing loses that mount when the directory is removed,
    and one that is made anew in its place is read-only to this process for ever. A file system that
    turned read-only looks the same but for this: what was remembered is not removed.

    The directory is the kubelet's, on a local disk, so to look at it does not block.
    """

    def __init__(self, path: Path, read_only: Callable[[Path], bool] = is_read_only) -> None:
        self.path = path
        self._read_only = read_only
        self._handle: int | None = None

    def is_lost(self) -> bool:
        """True when it was removed, and what is there now is read-only to this process."""
        try:
            read_only = self._read_only(self.path)
            if not read_only:
                self._remember()
        except OSError:
            return False
        return read_only and self._is_removed()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._forget()

    def _remember(self) -> None:
        found = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._forget()
        self._handle = found

    def _forget(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _is_removed(self) -> bool:
        return self._handle is not None and os.fstat(self._handle).st_nlink == 0
