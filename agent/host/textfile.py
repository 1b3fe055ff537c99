"""Small files that people write, read whole and never beyond a bound.

Those of settings may lie on a file system that hangs: `TextFiles` waits elsewhere, and no longer
than its caller does.
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
"""What a look at a path says where nothing is; the same as of pathlib's."""


class TextFiles:
    """Reads with aiofiles, each step by `offload`, whose thread holds up no exit."""

    def __init__(self, offload: Offload) -> None:
        self.offload = offload
        self._steps = _Steps(offload)

    async def is_there(self, path: Path) -> bool:
        """False for a file that is missing; one that cannot be looked at is there, and refused."""
        try:
            return stat.S_ISREG((await aiofiles.os.stat(path, loop=self._steps)).st_mode)
        except OSError as error:
            return error.errno not in MISSING

    async def read(self, path: Path, limit: int) -> bytes:
        """The content of a file of at most `limit` bytes. Raises SettingsError with what to do."""
        try:
            found = await aiofiles.os.stat(path, loop=self._steps)
            _refuse_pipe(path, found.st_mode)
            content = await self._content(path, limit + 1)
        except OSError as error:
            raise _unreadable(path, error) from error
        check_size(path, content, limit)
        return content

    async def _content(self, path: Path, limit: int) -> bytes:
        # Not `async with`: aiofiles closes on the loop's own pool then, whose threads are joined at
        # the end. And nobody who was cancelled waits here: the thread that hangs has the file.
        file = await aiofiles.open(path, "rb", loop=self._steps)
        try:
            content: bytes = await file.read(limit)
        except OSError:
            await file.close()
            raise
        await file.close()
        return content


class _Steps:
    """What aiofiles takes for its loop: runs each step of a file's by the offload."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload

    async def run_in_executor(self, _executor: None, step: Callable[[], R]) -> R:
        return await self._offload.call(step)


def read_bounded(path: Path, limit: int) -> bytes:
    """The same as TextFiles.read, here and now: for what a person names on a command line."""
    try:
        _refuse_pipe(path, path.stat().st_mode)
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    check_size(path, content, limit)
    return content


def check_size(path: Path, content: bytes, limit: int) -> None:
    """Nothing, for at most `limit` bytes. Raises SettingsError."""
    if len(content) > limit:
        raise SettingsError(f"{path}: is larger than {limit // 1024} KiB; is it the right file?")


def _refuse_pipe(path: Path, mode: int) -> None:
    if stat.S_ISFIFO(mode) and path.parent != Path("/dev"):  # /dev/stdin is a person's
        raise SettingsError(f"{path}: is a pipe, which is waited for; name a regular file")


def _unreadable(path: Path, error: OSError) -> SettingsError:
    reason = error.strerror or str(error)
    return SettingsError(f"{path}: cannot be read: {reason}; check the path and its rights")
