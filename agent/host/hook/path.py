"""The way to HAMi-core's directories on the host: from an open directory, never through a link."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent.core.errors import StateError
from agent.kit.dissolve import DIRECTORY

LISTED: Final = 100_000
"""Names above the container directories that are looked at; root alone makes any there."""
SLICE_ENTRIES: Final = 1000
SLICE_SECONDS: Final = 0.05
"""One part of the work on the thread that removes and measures."""
ADVICE = {
    errno.ENOENT: "make {hook}, a directory of root's",
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "raise the quota or free some space there",
    errno.EROFS: "mount it read-write",
    errno.ELOOP: "remove the link that is in its place",
    errno.ENOTDIR: "remove what is in its place: a link or a file",
    errno.EIO: "look for disk errors in the kernel's log",
}


def open_in(
    open_directories: contextlib.ExitStack, name: str, above: int | None, flags: int = DIRECTORY
) -> int:
    """The directory `name`, open for as long as the stack. Raises OSError."""
    found = os.open(name, flags, dir_fd=above)
    open_directories.callback(os.close, found)
    return found


def open_containers(hook: Path, open_directories: contextlib.ExitStack) -> int:
    """The open directory of the container directories, as it is. Raises OSError."""
    above = open_in(open_directories, str(hook), None, os.O_DIRECTORY)
    for step in ("vgpu", "containers"):
        above = open_in(open_directories, step, above)
    return above


@contextlib.contextmanager
def told(hook: Path) -> Iterator[None]:
    """What the disk answers becomes a StateError with what to do."""
    try:
        yield
    except OSError as error:
        usual = "make {hook} a directory of root's that the agent may write"
        advice = ADVICE.get(error.errno or 0, usual).format(hook=hook)
        raise StateError(
            f"HAMi-core's directories below {hook} cannot be used: {error.filename or 'an entry'}: "
            f"{error.strerror}; {advice}."
        ) from error
