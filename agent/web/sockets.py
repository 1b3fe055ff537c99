"""The agent's own unix socket: bound with its mode from the start, never taken from the living."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from agent.core.errors import PermissionFault

SOCKET_MODE = 0o660
DIRECTORY_MODE = 0o750


@contextlib.contextmanager
def unix_socket(path: Path) -> Iterator[socket.socket]:
    """A socket bound at `path`, not yet listening; its directory is made (0750) if missing.

    A socket that a dead process left is replaced. Leaving removes the file, if it is still ours.
    Raises PermissionFault: somebody answers there, something else lies there, or the directory
    may not be written.
    """
    try:
        path.parent.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        _clear(path)
        opened = _bound(path)
        ours = path.lstat()
    except OSError as error:
        raise PermissionFault(
            f"{path} cannot be bound: {error.strerror or error}; let the agent's user own its "
            "directory."
        ) from error
    try:
        yield opened
    finally:
        opened.close()
        with contextlib.suppress(OSError):
            if os.path.samestat(path.lstat(), ours):
                path.unlink()


def _bound(path: Path) -> socket.socket:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.setblocking(False)
        opened.bind(str(path))
        # Nobody can connect before listen(), so nobody can be there before the mode is right.
        path.chmod(SOCKET_MODE)
    except OSError:
        opened.close()
        raise
    return opened


def _clear(path: Path) -> None:
    """Make way for a socket, if what is there is one and nobody answers."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_socket():
        raise PermissionFault(f"{path} is in the way and no socket: remove it.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:  # its queue is full: somebody is there, and busy
            pass
    raise PermissionFault(
        f"{path} is served by another process: stop it, or give this one another run directory."
    )
