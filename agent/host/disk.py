"""The state directory: a crash at any step of a replace leaves one complete generation of a file.

The order makes it safe: write and sync the new content beside the old, give the old one a second
name, sync the directory, rename the new one into place, sync the directory again.

If the previous content is kept, three files take turns: the newest, the one before, and a spare
that is overwritten next. Spaces pad them beyond their content. So the next generations need no
new block and no inode, and are written even on a full disk.

One replace is one call on the worker thread: a call for each step would cost more than the steps.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Self

import structlog

from agent.core.errors import StateError
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


STEP: Final = 128 * 1024
"""Bytes: the size of the files that take turns is a multiple of this."""

GROWTH: Final = STEP // 2
"""Bytes by which the content can grow at least before it needs a new block."""


class DirectoryFiles:
    """The file operations of a replace in `directory`, an open descriptor. All raise OSError."""

    def __init__(self, directory: int) -> None:
        self._directory = directory

    def create(self, name: str) -> int:
        """Open an empty file that only its owner may read; truncate one of that name."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._directory)

    def reopen(self, name: str) -> tuple[int, int]:
        """Open a file to overwrite it from its start; return its handle and size.

        Raises FileNotFoundError: there is no regular file, or it has a second name.
        """
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        status = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return os.open(name, flags, dir_fd=self._directory), status.st_size

    def write(self, handle: int, data: memoryview) -> int:
        """Write the start of `data`; return how many bytes were written."""
        return os.write(handle, data)

    def cut(self, handle: int, size: int) -> None:
        """Truncate the file to `size` bytes."""
        os.ftruncate(handle, size)

    def sync(self, handle: int) -> None:
        """Return once the file's content is on disk."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close the handle."""
        os.close(handle)

    def link(self, name: str, second: str) -> None:
        """Give a file a second name, which no file has."""
        here = self._directory
        os.link(name, second, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=False)

    def rename(self, name: str, target: str) -> None:
        """Rename the file `name` to `target`; a file named `target` loses that name."""
        os.rename(name, target, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def unlink(self, name: str) -> None:
        """Remove a name."""
        os.unlink(name, dir_fd=self._directory)

    def sync_directory(self) -> None:
        """Return once the names are on disk."""
        os.fsync(self._directory)


def replace(files: DirectoryFiles, name: str, data: bytes, keep: str | None = None) -> None:
    """Replace the content of `name`; the old content gets the name `keep`. Raises OSError.

    With `keep`, spaces follow `data`: see unpadded(). After an error `name` has its old content
    and the unfinished file is removed. The spare stays.
    """
    fresh, backup = f".{name}.new", keep or f".{name}.old"
    spent = f".{name}.spent"
    if keep:
        _write_over(files, _spare(files, fresh, spent), fresh, data)
        # If this fails, the next spare is a new file, or the one that a crash left there.
        with contextlib.suppress(OSError):
            files.link(keep, spent)
    else:
        _write(files, fresh, data)
    try:
        is_kept = _keep(files, name, backup)
        if is_kept and keep:
            files.sync_directory()
        files.rename(fresh, name)
    except OSError:
        if not keep:
            _drop(files, fresh)
        raise
    try:
        files.sync_directory()
    except OSError:
        _take_back(files, name, backup if is_kept else None)
        raise
    if keep:
        with contextlib.suppress(OSError):
            files.rename(spent, fresh)
    else:
        _drop(files, backup)


def unpadded(content: bytes) -> bytes:
    """The data given to replace(), from the file's content. Such data never ends in a space."""
    return content.rstrip(b" ")


def _write(files: DirectoryFiles, name: str, data: bytes) -> None:
    """Write and sync a new file with `data`."""
    _drop(files, name)  # a new inode: after a failed sync, pages of the old one may be lost
    handle = files.create(name)
    try:
        try:
            _write_all(files, handle, data)
            files.sync(handle)
        finally:
            files.close(handle)
    except OSError:
        _drop(files, name)
        raise


def _spare(files: DirectoryFiles, name: str, spent: str) -> tuple[int, int]:
    """Open the file to overwrite: the spare, else one left by a crash, else a new one; its size."""
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            return files.reopen(name)
        with contextlib.suppress(OSError):
            files.rename(spent, name)
    _drop(files, name)
    return files.create(name), 0


def _write_over(files: DirectoryFiles, spare: tuple[int, int], name: str, data: bytes) -> None:
    """Write `data` into the spare with its padding, and sync it."""
    handle, had = spare
    wanted = -(-(len(data) + GROWTH) // STEP) * STEP
    least = max(len(data), min(had, wanted))
    try:
        _write_all(files, handle, data.ljust(least))
        if least < wanted:
            with contextlib.suppress(OSError):  # padding is needed later, not for this generation
                _write_all(files, handle, b" " * (wanted - least))
        if had > wanted:
            files.cut(handle, wanted)
        try:
            files.sync(handle)
        except OSError:
            _drop(files, name)  # after a failed sync its pages may be lost
            raise
    finally:
        files.close(handle)


def _write_all(files: DirectoryFiles, handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[files.write(handle, rest) :]


def _keep(files: DirectoryFiles, name: str, backup: str) -> bool:
    """Give the present content of `name` the name `backup`; False when there is none."""
    second = f".{backup.lstrip('.')}.link"
    _drop(files, second)
    try:
        files.link(name, second)
    except FileNotFoundError:
        return False
    files.rename(second, backup)
    _drop(files, second)  # rename() does nothing when both already name the same file
    return True


def _take_back(files: DirectoryFiles, name: str, backup: str | None) -> None:
    """Undo the last rename: `name` gets the content of `backup` again, or is removed."""
    if backup is None:
        files.unlink(name)
        return
    second = f".{name}.back"
    _drop(files, second)
    files.link(backup, second)
    files.rename(second, name)


def _drop(files: DirectoryFiles, name: str) -> None:
    """Remove a name if it exists. If this fails, the next step raises the reason."""
    with contextlib.suppress(OSError):
        files.unlink(name)


class HostDisk:
    """The Disk port over the directory `path`, which is opened once; `offload` runs all calls."""

    def __init__(self, path: Path, directory: int, files: DirectoryFiles, offload: Offload) -> None:
        self._path = path
        self._directory = directory
        self._files = files
        self._offload = offload

    @classmethod
    async def open(
        cls, path: Path, offload: Offload, files: Callable[[int], DirectoryFiles] = DirectoryFiles
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
