"""Our socket files in the kubelet's directory: names, binding, and clearing away dead ones.

A name is never used twice: a kubelet may still hold a record of the one before, and a server that
stops late would delete the file of its successor.
"""

import dataclasses
import errno
import os
import random
import re
import socket
import stat
from pathlib import Path

from agent.core.errors import KubeletError, PermissionFault, SettingsError
from agent.kit.cell import Cell

PATH_LIMIT = 107
"""Bytes of a unix socket's path, without the closing zero."""

MODE = 0o600

NVIDIA = "nvidia.com"

_TRIES = 5


@dataclasses.dataclass(frozen=True, slots=True)
class BoundSocket:
    """A socket of ours, bound and private (0600), not yet listening."""

    path: Path
    sock: socket.socket
    identity: tuple[int, int]
    """Device and inode of the file: what is ours to delete."""

    def unlink(self) -> None:
        """Delete the file, unless it is gone or somebody else's by now."""
        if _identity(self.path) == self.identity:
            self.path.unlink(missing_ok=True)


def bind(directory: Path, resource: str, chance: random.Random) -> BoundSocket:
    """Bind a new name in `directory`.

    Raises:
        SettingsError: the path of the directory is too long for any socket in it.
        PermissionFault: the directory may not be written, or others may write it.
        KubeletError: the directory is not there, or binding failed in another way.
    """
    check_directory(directory)
    for _ in range(_TRIES):
        path = directory / socket_name(directory, resource, chance)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # The file is born with its mode: a chmod afterwards could be led astray by a link.
            os.fchmod(sock.fileno(), MODE)
            sock.bind(os.fspath(path))
            identity = _born(path)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise _bind_error(path, error) from error
        if identity is not None:
            return BoundSocket(path, sock, identity)
        sock.close()
    raise KubeletError(f"no socket could be bound in {directory}: all names tried were taken")


def check_directory(directory: Path) -> None:
    """Nothing, where nobody else can put sockets in the place of the kubelet's.

    The kubelet makes the directory as root's, with mode 0750. One that is not there is safe.

    Raises:
        PermissionFault: others may write there.
    """
    try:
        found = directory.stat()
    except OSError:
        return  # binding says what is the matter
    if found.st_uid not in {0, os.geteuid()}:
        raise PermissionFault(
            f"{directory} belongs to uid {found.st_uid}, who could put other sockets there:"
            " give it to root [P-KUBELET]"
        )
    if found.st_mode & stat.S_IWOTH:
        raise PermissionFault(
            f"{directory} is writable by everybody, who could put other sockets there: make it"
            " 0750 [P-KUBELET]"
        )


def _born(path: Path) -> tuple[int, int] | None:
    """The identity of a socket that was just bound; None if something else lies there."""
    found = path.lstat()
    if not stat.S_ISSOCK(found.st_mode) or stat.S_IMODE(found.st_mode) != MODE:
        return None
    return found.st_dev, found.st_ino


def _bind_error(path: Path, error: OSError) -> KubeletError | PermissionFault:
    match error:
        case FileNotFoundError():
            return KubeletError(f"{path.parent} is not there: it comes with the kubelet's start")
        case PermissionError():
            return PermissionFault(f"{path.parent} may not be written: run the agent as root")
        case _:
            return KubeletError(f"{path} cannot be bound: {error.strerror}")


def socket_name(directory: Path, resource: str, chance: random.Random) -> str:
    """A new name: `hami-<tail of the resource>-<8 hex digits>.sock`, the tail cut to fit.

    Raises:
        SettingsError: not even a tail of one character fits.
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
    """Delete the sockets of our earlier servers that nobody listens on; return their names.

    Sockets of others and live ones are left alone, whatever they are called.
    """
    names = [name for name in _names(directory) if _is_ours(name, resource)]
    dead = sorted(name for name in names if _is_dead(directory / name))
    for name in dead:
        (directory / name).unlink(missing_ok=True)
    return tuple(dead)


@dataclasses.dataclass(frozen=True, slots=True)
class Rival:
    """The socket of HAMi's or NVIDIA's plugin for a resource, by the name that both give it.

    The name leaves out the resource's domain. Only NVIDIA's is taken for what it says: in another
    domain the socket is as likely that of the GPU Operator for nvidia.com, and tells nothing.
    Source: nvinternal/plugin/server.go of both, NewNvidiaDevicePlugin.
    """

    directory: Path
    resource: Cell[str]

    @property
    def names(self) -> tuple[str, ...]:
        """The base names whose coming and going tells of it; none where none does."""
        return (self.name,) if self.resource.value.startswith(f"{NVIDIA}/") else ()

    @property
    def name(self) -> str:
        """Its base name."""
        return f"nvidia-{self.resource.value.partition('/')[2]}.sock"

    @property
    def path(self) -> str:
        """The whole path."""
        return os.fspath(self.directory / self.name)

    def answers(self) -> bool | None:
        """Whether somebody listens there; None: there is no such socket that tells of it."""
        path = self.directory / self.name
        return not _is_dead(path) if self.names and _is_socket(path) else None


def _names(directory: Path) -> list[str]:
    try:
        return [entry.name for entry in directory.iterdir()]
    except OSError:
        return []


def _is_ours(name: str, resource: str) -> bool:
    found = re.fullmatch(r"hami-(.+)-[0-9a-f]{8}\.sock", name)
    return found is not None and _tail(resource).startswith(found[1])


def _is_dead(path: Path) -> bool:
    """True for a socket on which a connection is refused: its server is gone for good."""
    if not _is_socket(path):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return False


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
