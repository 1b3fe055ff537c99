"""The state directory: each file is replaced completely or not at all, also across a crash.

One replace is one call on the worker thread: a call for each step would cost more than the steps.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

import structlog

from agent.core.errors import StateError
from agent.kit.durable import Files, replace, unpadded
from agent.kit.offload import Offload
from agent.kit.writable import check_writable

log = structlog.get_logger(__name__)

SIZE_LIMIT = 64 * 1024 * 1024
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
ADVICE = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "raise the quota or free some space there",
    errno.EROFS: "mount it read-write",
    errno.EACCES: "let the agent's user own it",
    errno.EPERM: "let the agent's user own it",
    errno.ENOENT: "the directory was removed while the agent ran: restart the agent",
    errno.EIO: "look for disk errors in the kernel's log",
}


class DirectoryFiles:
    """The file operations of agent.kit.durable in `directory`, an open descriptor."""

    def __init__(self, directory: int) -> None:
        self._directory = directory

    def create(self, name: str) -> int:
        """See agent.kit.durable.Files; only the owner may read it, and no link is followed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._directory)

    def reopen(self, name: str) -> tuple[int, int]:
        """See agent.kit.durable.Files; what is no regular file counts as absent."""
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        status = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return os.open(name, flags, dir_fd=self._directory), status.st_size

    def cut(self, handle: int, size: int) -> None:
        """See agent.kit.durable.Files."""
        os.ftruncate(handle, size)

    def write(self, handle: int, data: memoryview) -> int:
        """See agent.kit.durable.Files."""
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        """See agent.kit.durable.Files."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """See agent.kit.durable.Files."""
        os.close(handle)

    def link(self, name: str, second: str) -> None:
        """See agent.kit.durable.Files."""
        os.link(
            name,
            second,
            src_dir_fd=self._directory,
            dst_dir_fd=self._directory,
            follow_symlinks=False,
        )

    def rename(self, name: str, target: str) -> None:
        """See agent.kit.durable.Files."""
        os.rename(name, target, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def unlink(self, name: str) -> None:
        """See agent.kit.durable.Files."""
        os.unlink(name, dir_fd=self._directory)

    def sync_directory(self) -> None:
        """See agent.kit.durable.Files."""
        os.fsync(self._directory)


class HostDisk:
    """The Disk port over the directory `path`, which is opened once; `offload` runs all calls."""

    def __init__(self, path: Path, directory: int, files: Files, offload: Offload) -> None:
        self._path = path
        self._directory = directory
        self._files = files
        self._offload = offload

    @classmethod
    async def open(
        cls, path: Path, offload: Offload, files: Callable[[int], Files] = DirectoryFiles
    ) -> Self:
        """Open the directory; make it (0750) if its parent exists. Take write from others.

        Raises StateError.
        """
        directory = await offload.call(_open_directory, path)
        return cls(path, directory, files(directory), offload)

    @property
    def place(self) -> str:
        """The directory's path."""
        return str(self._path)

    async def read(self, name: str) -> bytes | None:
        """Return the content, or None when the file is absent. Raises StateError."""
        return await self._offload.call(self._read, _checked(name))

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        """Replace the content durably; the file `keep` receives the old content.

        Raises StateError: the file has its old content.
        """
        if keep is not None:
            _checked(keep)
        await self._offload.call(self._replace, _checked(name), data, keep)

    async def check(self) -> None:
        """Check without writing that files can be replaced. Raises StateError."""
        await self._offload.call(self._check)

    def close(self) -> None:
        """Close the directory; no call may follow."""
        os.close(self._directory)

    def _check(self) -> None:
        with _state_errors(self._path, "written"):
            check_writable(self._directory, str(self._path))

    def _read(self, name: str) -> bytes | None:
        with _state_errors(self._path / name, "read"):
            try:
                handle = os.open(name, READ, dir_fd=self._directory)
            except FileNotFoundError:
                return None
            try:
                return unpadded(_content(handle, self._path / name))
            finally:
                os.close(handle)

    def _replace(self, name: str, data: bytes, keep: str | None) -> None:
        with _state_errors(self._path / name, "written"):
            replace(self._files, name, data, keep)


def _checked(name: str) -> str:
    if not name or name.startswith(".") or "/" in name:
        raise ValueError(f"{name!r} is not the name of a state file")
    return name


def _content(handle: int, path: Path) -> bytes:
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_size > SIZE_LIMIT:
        raise StateError(f"{path} is not a file of at most {SIZE_LIMIT} bytes: remove it.")
    content = bytearray()
    while more := os.read(handle, status.st_size + 1):
        content += more
    return bytes(content)


def _open_directory(path: Path) -> int:
    with _state_errors(path, "opened", {errno.ENOENT: f"make its parent directory {path.parent}"}):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o750)
        directory = os.open(path, DIRECTORY)
    mode = stat.S_IMODE(os.fstat(directory).st_mode)
    if mode & stat.S_IWOTH:  # a user who can write there can replace the state
        try:
            os.fchmod(directory, mode & ~stat.S_IWOTH)
        except PermissionError:
            log.warning("state.open_to_all", directory=str(path), mode=f"{mode:04o}")
        else:
            log.warning("state.closed_to_others", directory=str(path), mode=f"{mode:04o}")
    return directory


@contextlib.contextmanager
def _state_errors(
    path: Path, what: str, advice_by_code: Mapping[int, str] = ADVICE
) -> Iterator[None]:
    """Turn an OSError into a StateError that says what to do, by `advice_by_code`, then ADVICE."""
    try:
        yield
    except OSError as error:
        code = error.errno or 0
        usual = ADVICE.get(code, "look at the directory and its file system")
        advice = advice_by_code.get(code, usual)
        reason = error.strerror or type(error).__name__
        raise StateError(f"{path} cannot be {what}: {reason}; {advice}.") from error
