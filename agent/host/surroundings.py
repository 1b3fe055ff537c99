"""Inspects paths and sockets of this host; it changes none."""

import contextlib
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
    full = False  # has no room for a new file, by the rule of the running agent
    with contextlib.ExitStack() as opened:
        try:
            directory = os.open(path, os.O_PATH | os.O_DIRECTORY)
            opened.callback(os.close, directory)
            check_writable(directory, str(path))
        except OSError as error:
            full = error.errno == errno.ENOSPC
    writable = os.access(path, os.W_OK)
    return PathFacts(str(path), kind, status.st_uid, mode, writable, ours, full)


def plugin_sockets(directory: Path, kubelet: str) -> tuple[PluginSocket, ...]:
    """The sockets in the kubelet's directory except its own, which is named `kubelet`."""
    try:
        paths = sorted(path for path in directory.iterdir() if path.name != kubelet)
    except OSError:
        return ()
    sockets = []
    for path in paths:
        if look_at(path).kind == "socket":
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(CONNECT_SECONDS)
                code = probe.connect_ex(str(path))
            # Those codes: no process listens.
            alive = code not in {errno.ECONNREFUSED, errno.ENOENT}
            sockets.append(PluginSocket(str(path), alive=alive))
    return tuple(sockets)
