"""Inspects paths and sockets of this host; it changes none."""

import errno
import os
import socket
import stat
from pathlib import Path
from typing import Final

from agent.core.node.preflight import PathFacts, PluginSocket
from agent.kit.writable import check_writable

KINDS: Final = ((stat.S_ISDIR, "directory"), (stat.S_ISSOCK, "socket"), (stat.S_ISREG, "file"))
CONNECT_SECONDS: Final = 0.5


def look_at(path: Path) -> PathFacts:
    """Inspect the path, links followed; for a missing one, whether it could be created."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
        can_be_made = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
        return PathFacts(str(path), "", writable=can_be_made)
    except OSError as error:
        return PathFacts(str(path), f"path that cannot be looked at ({error.strerror or error})")
    kind = next((name for is_kind, name in KINDS if is_kind(status.st_mode)), "special file")
    mode, ours = stat.S_IMODE(status.st_mode), status.st_uid in {0, os.geteuid()}
    writable, full = os.access(path, os.W_OK), kind == "directory" and _is_full(path)
    return PathFacts(str(path), kind, status.st_uid, mode, writable, ours, full)


def _is_full(path: Path) -> bool:
    """Whether the directory has no room for a new file, by the rule of the running agent."""
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


def plugin_sockets(directory: Path, kubelet: str) -> tuple[PluginSocket, ...]:
    """The sockets in the kubelet's directory except its own, which is named `kubelet`."""
    try:
        paths = sorted(path for path in directory.iterdir() if path.name != kubelet)
    except OSError:
        return ()
    sockets = (str(path) for path in paths if look_at(path).kind == "socket")
    return tuple(PluginSocket(path, alive=_answers(path)) for path in sockets)


def _answers(path: str) -> bool:
    """False when no process listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_SECONDS)
        return probe.connect_ex(path) not in {errno.ECONNREFUSED, errno.ENOENT}
