"""Replacing a file so that a crash at any step leaves a whole generation of it.

The order is the point: write and sync the new content beside the old, give the old one its second
name, sync the directory, put the new one in its place, sync the directory again.
"""

import contextlib
from typing import Protocol


class Files(Protocol):
    """The steps that a replace is made of, in one directory. They raise OSError."""

    def create(self, name: str) -> int:
        """Open a new, empty file; one of that name is emptied."""
        ...

    def write(self, handle: int, data: memoryview) -> int:
        """Write as much of `data` as goes; return how much that was."""
        ...

    def sync(self, handle: int) -> None:
        """Return once the file's content is on disk."""
        ...

    def close(self, handle: int) -> None:
        """Let go of the handle."""
        ...

    def link(self, name: str, second: str) -> None:
        """Give a file a second name, which is free."""
        ...

    def rename(self, name: str, target: str) -> None:
        """Give the file `name` the name `target`, which loses what it named before."""
        ...

    def unlink(self, name: str) -> None:
        """Remove a name."""
        ...

    def sync_directory(self) -> None:
        """Return once the names are on disk."""
        ...


def replace(files: Files, name: str, data: bytes, keep: str | None = None) -> None:
    """Replace the content of `name`; `keep` receives what it was. Raises OSError.

    After an error `name` has its old content, and what was begun is removed.
    """
    fresh, backup = f".{name}.new", keep or f".{name}.old"
    try:
        _write(files, fresh, data)
        is_kept = _keep(files, name, backup)
        if is_kept and keep:
            files.sync_directory()
        files.rename(fresh, name)
    except OSError:
        _drop(files, fresh)
        raise
    try:
        files.sync_directory()
    except OSError:
        _take_back(files, name, backup if is_kept else None)
        raise
    if not keep:
        _drop(files, backup)


def _write(files: Files, name: str, data: bytes) -> None:
    """A new file with `data`, on disk."""
    _drop(files, name)  # a new inode: pages of one that could not be synced may be lost unseen
    handle = files.create(name)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[files.write(handle, rest) :]
        files.sync(handle)
    finally:
        files.close(handle)


def _keep(files: Files, name: str, backup: str) -> bool:
    """Let `backup` name the present content of `name`; False when there is none."""
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
    """Undo the last rename: `name` has again what `backup` names, or nothing."""
    if backup is None:
        files.unlink(name)
        return
    second = f".{name}.back"
    _drop(files, second)
    files.link(backup, second)
    files.rename(second, name)


def _drop(files: Files, name: str) -> None:
    """Remove a name if it is there. Where that is refused, the step that follows says why."""
    with contextlib.suppress(OSError):
        files.unlink(name)
