"""Opens HAMi-core's directories on the host, each from the one above it, through no link."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent.core.errors import StateError
from agent.kit.dissolve import DIRECTORY

NAME: Final = re.compile(r"[0-9a-f-]{1,64}_[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""Names of container directories: <pod UID>_<container>."""
LISTED: Final = 100_000
"""Entries read beside the container directories; only root can create any there."""
SLICE_ENTRIES: Final = 1000
SLICE_SECONDS: Final = 0.05
"""One part of removing ends after so many entries or seconds."""
ADVICE = {
    errno.ENOENT: "make the directory {hook}, owned by root",
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "raise the quota or free some space there",
    errno.EROFS: "mount it read-write",
    errno.ELOOP: "remove the link in its place",
    errno.ENOTDIR: "remove the link or file in its place",
    errno.EIO: "look for disk errors in the kernel's log",
}


def open_in(
    open_directories: contextlib.ExitStack, name: str, above: int | None, flags: int = DIRECTORY
) -> int:
    """Open the directory `name` until the stack closes. Raises OSError."""
    opened = os.open(name, flags, dir_fd=above)
    open_directories.callback(os.close, opened)
    return opened


def open_containers(hook: Path, open_directories: contextlib.ExitStack) -> int:
    """Open the parent of the container directories. Raises OSError."""
    above = open_in(open_directories, str(hook), None, os.O_DIRECTORY)
    for step in ("vgpu", "containers"):
        above = open_in(open_directories, step, above)
    return above


@contextlib.contextmanager
def state_errors(hook: Path) -> Iterator[None]:
    """Turn an OSError into a StateError that says what to do."""
    try:
        yield
    except OSError as error:
        usual = "make {hook} a directory that root owns and the agent may write"
        advice = ADVICE.get(error.errno or 0, usual).format(hook=hook)
        raise StateError(
            f"HAMi-core's directories below {hook} cannot be used: {error.filename or 'an entry'}: "
            f"{error.strerror}; {advice}."
        ) from error
