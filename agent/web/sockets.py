"""Binds the agent's own unix socket; it replaces only a socket that no process serves."""

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
    """Bind a socket at `path`, not yet listening, for the block; make its directory (0750).

    A socket that a dead process left is replaced. At the end the file is removed, unless it was
    replaced. Raises PermissionFault: a process answers there, another file is there, or the agent
    may not write the directory.
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
        # No client can connect before listen(), so the mode is set in time.
        path.chmod(SOCKET_MODE)
    except OSError:
        opened.close()
        raise
    return opened


def _clear(path: Path) -> None:
    """Remove a dead socket. Raises PermissionFault for a live one or another file."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_socket():
        raise PermissionFault(f"{path} is in the way of the socket and is not a socket: remove it.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:  # its queue is full: a busy process serves it
            pass
    raise PermissionFault(
        f"{path} is served by another process: stop it, or give this one another run directory."
    )
