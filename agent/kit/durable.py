"""Replacing a file so that a crash at any step leaves a whole generation of it.

The order is the point: write and sync the new content beside the old, give the old one its second
name, sync the directory, put the new one in its place, sync the directory again.

Where the content before is kept, three files take turns: the newest, the one before, and a spare
that is written over next. They are padded with spaces beyond their content, so that the next
generations need no new block and no inode: a disk that somebody else filled takes them still.
"""

import contextlib
from typing import Final, Protocol

STEP: Final = 128 * 1024
"""Bytes: files that take turns have a size of so many, or a multiple of it."""

GROWTH: Final = STEP // 2
"""Bytes at least by which the content can grow with no new block."""


class Files(Protocol):
    """The steps that a replace is made of, in one directory. They raise OSError."""

    def create(self, name: str) -> int:
        """Open a new, empty file; one of that name is emptied."""
        ...

    def reopen(self, name: str) -> tuple[int, int]:
        """Open a file to write over it from its start; its handle and size.

        Raises FileNotFoundError: there is none, or it has another name, too.
        """
        ...

    def write(self, handle: int, data: memoryview) -> int:
        """Write as much of `data` as goes; return how much that was."""
        ...

    def cut(self, handle: int, size: int) -> None:
        """Take away what the file has beyond `size`."""
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

    With `keep`, spaces follow `data`: see unpadded(). After an error `name` has its old content,
    and what was begun is removed. The spare stays.
    """
    fresh, backup = f".{name}.new", keep or f".{name}.old"
    spent = f".{name}.spent"
    if keep:
        _write_over(files, _spare(files, fresh, spent), fresh, data)
        # Without it the next spare is a new file. One that a crash left there is as good.
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
    """What replace() was given, of what it wrote. Content of ours ends in no space."""
    return content.rstrip(b" ")


def _write(files: Files, name: str, data: bytes) -> None:
    """A new file with `data`, on disk."""
    _drop(files, name)  # a new inode: pages of one that could not be synced may be lost unseen
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
    """The file to write over, open, and its size: the spare; else what a crash left; else new."""
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            return files.reopen(name)
        with contextlib.suppress(OSError):
            files.rename(spent, name)
    _drop(files, name)
    return files.create(name), 0


def _write_over(files: Files, spare: tuple[int, int], name: str, data: bytes) -> None:
    """`data` in the spare, padded and on disk."""
    handle, had = spare
    wanted = -(-(len(data) + GROWTH) // STEP) * STEP
    least = max(len(data), min(had, wanted))
    try:
        _write_all(files, handle, data.ljust(least))
        if least < wanted:
            with contextlib.suppress(OSError):  # room for later, where there is any now
                _write_all(files, handle, b" " * (wanted - least))
        if had > wanted:
            files.cut(handle, wanted)
        try:
            files.sync(handle)
        except OSError:
            _drop(files, name)  # its pages may be lost unseen
            raise
    finally:
        files.close(handle)


def _write_all(files: Files, handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[files.write(handle, rest) :]


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
