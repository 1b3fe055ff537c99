"""Directories: removed in small steps, and checked for room."""

import contextlib
import errno
import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

# Removes a directory with all its content in small steps. It follows no link and crosses no
# mount. Another process may still write into the directory. A directory of our own user needs no
# capability.

PLACE: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FULL: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST})
FAILURES: Final = 1000  # after so many entries that stay, a pass over the directory is given up


def remove_stepwise(name: str, above: int) -> Iterator[None]:
    """Remove `name` from the open directory `above`. Each step takes a few system calls.

    Nested directories are moved up and emptied there. So any depth needs only two descriptors. A
    mount point cannot be moved, and only moved directories are entered: it stays with its content.
    Raises OSError at the end: why the first remaining entry could not be removed.
    """
    if _is_gone(name, above):
        return
    top = open_own(name, above)
    try:
        yield from _Emptying(top).steps()
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=above)


def open_own(name: str, above: int) -> int:
    """Open the directory `name`; one of our user's first gets the mode 0700. Raises OSError."""
    place = os.open(name, PLACE, dir_fd=above)
    try:
        set_mode(place, 0o700, at_least=True)
        return os.open(".", DIRECTORY, dir_fd=place)
    finally:
        os.close(place)


def set_mode(place: int, mode: int, *, at_least: bool = False) -> None:
    """Set the mode of a directory that is open as a PLACE, whatever mode it has. Raises OSError.

    With `at_least`, only a directory of our user's that lacks bits of it.
    """
    status = os.fstat(place)
    if at_least and (status.st_uid != os.geteuid() or status.st_mode & mode == mode):
        return
    if status.st_mode & 0o7777 != mode:
        # fchmod() refuses an O_PATH descriptor. This path names the same inode.
        path = Path(f"/proc/self/fd/{place}")
        try:
            path.chmod(mode)
        except OSError as error:
            error.filename = str(path.readlink())  # for people
            raise


class _Emptying:
    """Empties the open directory `top`."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._ours = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._changed = True
        self._errors: list[OSError] = []

    def steps(self) -> Iterator[None]:
        """Make passes until nothing is left, or a pass changes nothing. Raises OSError.

        Each pass removes a level: what was nested is then in `top`.
        """
        while self._changed:
            self._changed, self._errors = False, []
            with os.scandir(self._top) as entries:
                for entry in entries:
                    yield from self._take(entry.name)
            if self._errors and not self._changed:
                raise self._errors[0]

    def _take(self, name: str) -> Iterator[None]:
        """Remove an entry, or all in it; what is nested deeper moves up."""
        nested = None
        with self._noted():
            if _is_gone(name, self._top):
                self._changed = True
            else:
                if not name.startswith(self._ours):
                    name = self._move(name, self._top)
                nested = open_own(name, self._top)
        yield
        if nested is None:
            return

        try:
            with os.scandir(nested) as entries:
                for entry in entries:
                    with self._noted():
                        if not _is_gone(entry.name, nested):
                            self._move(entry.name, nested)
                        self._changed = True
                    yield
        finally:
            os.close(nested)

        with self._noted():
            os.rmdir(name, dir_fd=self._top)
            self._changed = True
        yield

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Note why an entry remains. Raises OSError after FAILURES of them."""
        try:
            yield
        except FileNotFoundError:
            self._changed = True
        except OSError as error:
            self._errors.append(error)
            if len(self._errors) >= FAILURES:
                raise self._errors[0] from None

    def _move(self, name: str, above: int) -> str:
        """Give the directory a name of ours in the top one. Raises OSError."""
        moved = f"{self._ours}-{next(self._numbers)}"
        # A rename in the same parent shows that nothing is mounted there. Then it is made writable,
        # which it must be to get another parent.
        os.rename(name, moved, src_dir_fd=above, dst_dir_fd=above)
        if above != self._top:
            os.close(open_own(moved, above))
            os.rename(moved, moved, src_dir_fd=above, dst_dir_fd=self._top)
        return moved


def _is_gone(name: str, above: int) -> bool:
    """Remove a file, a link or an empty directory; False: it has content. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        try:
            os.unlink(name, dir_fd=above)
        except IsADirectoryError:
            try:
                os.rmdir(name, dir_fd=above)
            except OSError as error:
                if error.errno in FULL:
                    return False
                raise
    return True


def check_writable(
    directory: int,
    name: str,
    look: Callable[[int], os.statvfs_result] = os.fstatvfs,
    user: Callable[[], int] = os.geteuid,
) -> None:
    """Raise OSError, with `name`: the open `directory` is removed, read-only or full.

    Blocks reserved for root count only for root. A file system that reports no size, or creates
    inodes when needed, never counts as full.
    """
    system = look(directory)
    free = system.f_bavail if user() else system.f_bfree
    code = 0
    if os.fstat(directory).st_nlink == 0:
        code = errno.ENOENT
    elif system.f_flag & os.ST_RDONLY:
        code = errno.EROFS
    elif (system.f_blocks and not free) or (system.f_files and not system.f_ffree):
        code = errno.ENOSPC
    if code:
        raise OSError(code, os.strerror(code), name)
