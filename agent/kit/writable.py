"""Checks whether a directory can take a new file, without writing there."""

import errno
import os
from collections.abc import Callable


def check_writable(
    directory: int,
    name: str,
    look: Callable[[int], os.statvfs_result] = os.fstatvfs,
    user: Callable[[], int] = os.geteuid,
) -> None:
    """Check that the open `directory` still exists, is not read-only and is not full.

    Blocks reserved for root count only for root. A file system that reports no size, or creates
    inodes when needed, never counts as full.

    Raises:
        OSError: ENOENT, EROFS or ENOSPC, with `name` as its file name.
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
