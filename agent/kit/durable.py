"""Replaces a file so that a crash at any step leaves one complete generation of it.

The order makes it safe: write and sync the new content beside the old, give the old one a second
name, sync the directory, rename the new one into place, sync the directory again.

If the previous content is kept, three files take turns: the newest, the one before, and a spare
that is overwritten next. Spaces pad them beyond their content. So the next generations need no
new block and no inode, and are written even on a full disk.
"""

import contextlib
from typing import Final, Protocol

STEP: Final = 128 * 1024
"""Bytes: the size of the files that take turns is a multiple of this."""

GROWTH: Final = STEP // 2
"""Bytes by which the content can grow at least before it needs a new block."""


class Files(Protocol):
    """The file operations of a replace, in one directory. All raise OSError."""

    def create(self, name: str) -> int:
        """Open an empty file; truncate one of that name."""
        ...

    def reopen(self, name: str) -> tuple[int, int]:
        """Open a file to overwrite it from its start; return its handle and size.

        Raises FileNotFoundError: there is none, or it has a second name.
        """
        ...

    def write(self, handle: int, data: memoryview) -> int:
        """Write the start of `data`; return how many bytes were written."""
        ...

    def cut(self, handle: int, size: int) -> None:
        """Truncate the file to `size` bytes."""
        ...

    def sync(self, handle: int) -> None:
        """Return once the file's content is on disk."""
        ...

    def close(self, handle: int) -> None:
        """Close the handle."""
        ...

    def link(self, name: str, second: str) -> None:
        """Give a file a second name, which no file has."""
        ...

    def rename(self, name: str, target: str) -> None:
        """Rename the file `name` to `target`; a file named `target` loses that name."""
        ...

    def unlink(self, name: str) -> None:
        """Remove a name."""
        ...

    def sync_directory(self) -> None:
        """Return once the names are on disk."""
        ...


def replace(files: Files, name: str, data: bytes, keep: str | None = None) -> None:
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


def _write(files: Files, name: str, data: bytes) -> None:
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


def _spare(files: Files, name: str, spent: str) -> tuple[int, int]:
    """Open the file to overwrite: the spare, else one left by a crash, else a new one; its size."""
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            return files.reopen(name)
        with contextlib.suppress(OSError):
            files.rename(spent, name)
    _drop(files, name)
    return files.create(name), 0


def _write_over(files: Files, spare: tuple[int, int], name: str, data: bytes) -> None:
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


def _write_all(files: Files, handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[files.write(handle, rest) :]


def _keep(files: Files, name: str, backup: str) -> bool:
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


def _take_back(files: Files, name: str, backup: str | None) -> None:
    """Undo the last rename: `name` gets the content of `backup` again, or is removed."""
    if backup is None:
        files.unlink(name)
        return
    second = f".{name}.back"
    _drop(files, second)
    files.link(backup, second)
    files.rename(second, name)


def _drop(files: Files, name: str) -> None:
    """Remove a name if it exists. If this fails, the next step raises the reason."""
    with contextlib.suppress(OSError):
        files.unlink(name)
