"""The agent's socket files in the kubelet's directory: naming, binding, removing dead ones.

No name is used twice: the kubelet may still have a record of an earlier one, and a server that
stops late would delete its successor's file.
"""

import errno
import os
import random
import re
import socket
import stat
from pathlib import Path

import msgspec

from agent.core.errors import KubeletError, PermissionFault, SettingsError

PATH_LIMIT = 107
"""Bytes of a unix socket's path, without the closing zero."""

MODE = 0o600

_TRIES = 5


class BoundSocket(msgspec.Struct, frozen=True):
    """A socket of the agent, bound and private (0600), not yet listening."""

    path: Path
    sock: socket.socket
    identity: tuple[int, int]
    """Device and inode of the file: only this file may be deleted."""

    def unlink(self) -> None:
        """Delete the file, unless it is gone or was replaced."""
        try:
            status = self.path.lstat()
        except OSError:
            return
        if (status.st_dev, status.st_ino) == self.identity:
            self.path.unlink(missing_ok=True)


def bind(directory: Path, resource: str, chance: random.Random) -> BoundSocket:
    """Bind a new name in `directory`.

    Raises:
        SettingsError: the path of the directory is too long for any socket in it.
        PermissionFault: the agent may not write the directory, or others may.
        KubeletError: the directory is missing, or binding failed otherwise.
    """
    check_directory(directory)
    for _ in range(_TRIES):
        path = directory / socket_name(directory, resource, chance)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # The file is created with its mode: a later chmod could follow a link.
            os.fchmod(sock.fileno(), MODE)
            sock.bind(os.fspath(path))
            status = path.lstat()
        except OSError as error:
            sock.close()
            match error:
                case OSError(errno=errno.EADDRINUSE):
                    continue
                case FileNotFoundError():
                    text = f"{directory} is not there: the kubelet makes it at its start"
                    raise KubeletError(text) from error
                case PermissionError():
                    text = f"{directory} may not be written: run the agent as root"
                    raise PermissionFault(text) from error
                case _:
                    raise KubeletError(f"{path} cannot be bound: {error.strerror}") from error
        # Another file in its place was put there after the bind.
        if stat.S_ISSOCK(status.st_mode) and stat.S_IMODE(status.st_mode) == MODE:
            return BoundSocket(path, sock, (status.st_dev, status.st_ino))
        sock.close()
    raise KubeletError(f"no socket could be bound in {directory}: all names tried were taken")


def check_directory(directory: Path) -> None:
    """Check that no other user can replace sockets in the kubelet's directory.

    The kubelet creates it with owner root and mode 0750. A missing directory passes.

    Raises:
        PermissionFault: others may write there.
    """
    try:
        status = directory.stat()
    except OSError:
        return  # binding raises the reason
    if status.st_uid not in {0, os.geteuid()}:
        raise PermissionFault(
            f"{directory} belongs to uid {status.st_uid}, who could put other sockets there:"
            " give it to root [P-KUBELET]"
        )
    if status.st_mode & stat.S_IWOTH:
        raise PermissionFault(
            f"{directory} is writable by everybody, who could put other sockets there: make it"
            " 0750 [P-KUBELET]"
        )


def socket_name(directory: Path, resource: str, chance: random.Random) -> str:
    """A new name: `hami-<tail of the resource>-<8 hex digits>.sock`, the tail cut to fit.

    Raises:
        SettingsError: the directory is too long for any name.
    """
    ending = f"-{chance.getrandbits(32):08x}.sock"
    room = PATH_LIMIT - len(os.fsencode(directory)) - len(f"/hami-{ending}")
    if room < 1:
        raise SettingsError(
            f"{directory} is too long for a socket path of {PATH_LIMIT} bytes:"
            " the kubelet's directory needs a shorter path"
        )
    return f"hami-{_tail(resource)[:room]}{ending}"


def _tail(resource: str) -> str:
    return resource.rpartition("/")[2]


def sweep(directory: Path, resource: str) -> tuple[str, ...]:
    """Delete the dead sockets of the agent's earlier servers; return their names.

    Live sockets and those of other plugins stay.
    """
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError:
        return ()  # binding raises the reason
    dead = []
    for name in names:
        ours = re.fullmatch(r"hami-(.+)-[0-9a-f]{8}\.sock", name)
        # The tail of a long resource is cut in the name.
        if ours and _tail(resource).startswith(ours[1]) and listens(directory / name) is False:
            (directory / name).unlink(missing_ok=True)
            dead.append(name)
    return tuple(dead)


def listens(path: Path) -> bool | None:
    """Whether a socket has a server: one whose server has ended refuses. None: it is no socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return None
    except OSError:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(os.fspath(path)) != errno.ECONNREFUSED
