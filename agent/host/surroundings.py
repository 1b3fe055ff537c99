"""A look at paths and sockets of this host, without changing any."""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent.core.node.preflight import PathFacts, PluginSocket
from agent.kit.writable import check_writable

KINDS: Final = ((stat.S_ISDIR, "directory"), (stat.S_ISSOCK, "socket"), (stat.S_ISREG, "file"))
CONNECT_SECONDS: Final = 0.5


def host_name() -> str:
    """This host's name, as the kubelet makes the name of its Node of it.

    Source: kubernetes pkg/util/node/node.go GetHostname.
    """
    return socket.gethostname().strip().lower()


def look_at(path: Path) -> PathFacts:
    """The path as it is; links are followed. Of what is missing: could it be made?"""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return PathFacts(str(path), "", writable=_makable(path))
    except OSError as error:
        return PathFacts(str(path), f"path that cannot be looked at ({error.strerror or error})")
    kind = next((name for holds, name in KINDS if holds(found.st_mode)), "special file")
    mode, ours = stat.S_IMODE(found.st_mode), found.st_uid in {0, os.geteuid()}
    writable, full = os.access(path, os.W_OK), kind == "directory" and _is_full(path)
    return PathFacts(str(path), kind, found.st_uid, mode, writable, ours, full)


def _is_full(path: Path) -> bool:
    """Whether nothing new finds room in the directory, as the agent sees it while it serves."""
    try:
        directory = os.open(path, os.O_PATH | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        check_writable(directory, str(path))
    except OSError as error:
        return error.errno == errno.ENOSPC
    finally:
        os.close(directory)
    return False


def _makable(path: Path) -> bool:
    """Whether the nearest folder above that exists lets something be made in it."""
    above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    return above.is_dir() and os.access(above, os.W_OK | os.X_OK)


def plugin_sockets(directory: Path, kubelet: str) -> tuple[PluginSocket, ...]:
    """The sockets in the kubelet's directory but its own, which is named `kubelet`."""
    return tuple(
        PluginSocket(str(path), alive=_answers(path)) for path in _sockets(directory, kubelet)
    )


def _sockets(directory: Path, kubelet: str) -> Iterator[Path]:
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return
    for path in entries:
        if path.name != kubelet and look_at(path).kind == "socket":
            yield path


def _answers(path: Path) -> bool:
    """False where nobody listens any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_SECONDS)
        return probe.connect_ex(os.fspath(path)) not in {errno.ECONNREFUSED, errno.ENOENT}
