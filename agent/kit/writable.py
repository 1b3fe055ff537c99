"""Whether a directory can take something new, as far as that is seen without writing there."""

import errno
import os
from collections.abc import Callable


def check_writable(
    directory: int,
    name: str,
    look: Callable[[int], os.statvfs_result] = os.fstatvfs,
    user: Callable[[], int] = os.geteuid,
) -> None:
    """Nothing, when the open `directory` is there yet, not read-only and not full.

    What is set aside for root counts for root alone. A file system that does not tell its size, or
    makes inodes as they are needed, is full for nobody.

    Raises:
        OSError: ENOENT, EROFS or ENOSPC, with `name` as its file name.
    """
    found = look(directory)
    free = found.f_bavail if user() else found.f_bfree
    code = 0
    if os.fstat(directory).st_nlink == 0:
        code = errno.ENOENT
    elif found.f_flag & os.ST_RDONLY:
        code = errno.EROFS
    elif (found.f_blocks and not free) or (found.f_files and not found.f_ffree):
        code = errno.ENOSPC
    if code:
        raise OSError(code, os.strerror(code), name)
