"""Reads small files that people write, up to a size limit.

Settings files may lie on a file system that hangs: TextFiles blocks only a thread of its own.
"""

import errno
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import aiofiles
import aiofiles.os

from agent.core.errors import SettingsError
from agent.kit.offload import Offload

R = TypeVar("R")

MISSING: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP})
"""The errors of stat() for a missing file; pathlib uses the same."""


class TextFiles:
    """Reads with aiofiles; `offload` runs each step on a thread that does not delay an exit."""

    def __init__(self, offload: Offload) -> None:
        self.offload = offload
        self._steps = _Steps(offload)

    async def is_there(self, path: Path) -> bool:
        """False for a missing file. One that cannot be inspected exists; reading it fails."""
        try:
            return stat.S_ISREG((await aiofiles.os.stat(path, loop=self._steps)).st_mode)
        except OSError as error:
            return error.errno not in MISSING

    async def read(self, path: Path, limit: int) -> bytes:
        """Return the content of a file of at most `limit` bytes. Raises SettingsError."""
        try:
            status = await aiofiles.os.stat(path, loop=self._steps)
            _refuse_pipe(path, status.st_mode)
            content = await self._content(path, limit + 1)
        except OSError as error:
            raise _unreadable(path, error) from error
        check_size(path, content, limit)
        return content

    async def _content(self, path: Path, limit: int) -> bytes:
        # Not `async with`: aiofiles would close on the loop's own pool, whose threads are joined at
        # exit. A cancelled caller does not close: the thread that hangs still uses the file.
        file = await aiofiles.open(path, "rb", loop=self._steps)
        try:
            content: bytes = await file.read(limit)
        except OSError:
            await file.close()
            raise
        await file.close()
        return content


class _Steps:
    """Stands in for the loop that aiofiles uses: runs each step by the offload."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload

    async def run_in_executor(self, _executor: None, step: Callable[[], R]) -> R:
        return await self._offload.call(step)


def read_bounded(path: Path, limit: int) -> bytes:
    """Do the same as TextFiles.read, but block: for files that a command line names."""
    try:
        _refuse_pipe(path, path.stat().st_mode)
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    check_size(path, content, limit)
    return content


def check_size(path: Path, content: bytes, limit: int) -> None:
    """Raise SettingsError for more than `limit` bytes."""
    if len(content) > limit:
        raise SettingsError(f"{path}: is larger than {limit // 1024} KiB; is it the right file?")


def _refuse_pipe(path: Path, mode: int) -> None:
    if stat.S_ISFIFO(mode) and path.parent != Path("/dev"):  # /dev/stdin may be a pipe
        raise SettingsError(f"{path}: is a pipe, which may block for ever; name a regular file")


def _unreadable(path: Path, error: OSError) -> SettingsError:
    reason = error.strerror or str(error)
    return SettingsError(f"{path}: cannot be read: {reason}; check the path and its rights")
