"""What lies on the node outside the tenants' own directories, to see that nothing changes it."""

import hashlib
import os
import stat
from pathlib import Path

from agent.sandbox.lab.places import Places

Entry = tuple[str, ...]
REPLACED = frozenset({"state.json", "state.previous.json", "kubelet_internal_checkpoint"})
"""Written anew with every pod, by the agent and by the kubelet."""


def snapshot(places: Places, *others: Path) -> dict[str, Entry]:
    """Every path with its type, mode, owner, number of names, inode and content.

    Of the directory above the containers' all is left out but what is named in `others`, which is
    taken whole; of a file that is replaced with every pod, inode and content are.
    """
    found: dict[str, Entry] = {}
    containers = places.hook / "vgpu" / "containers"
    for above, folders, files in os.walk(places.root):
        here = Path(above)
        if here in {containers, places.cgroup}:
            folders.clear()
            continue
        for name in (*folders, *files):
            found[str(here / name)] = _entry(here / name)
    for other in others:
        for path in (other, *other.rglob("*")):
            found[str(path)] = _entry(path)
    return found


def _entry(path: Path) -> Entry:
    """What must stay as it is; a directory's size and times follow what is in it."""
    status = path.lstat()
    kind = stat.filemode(status.st_mode)
    fixed = (kind, str(status.st_uid), str(status.st_gid))
    if path.name in REPLACED:
        return (*fixed, str(status.st_nlink))
    if stat.S_ISREG(status.st_mode):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        return (*fixed, str(status.st_nlink), str(status.st_ino), content)
    return (*fixed, str(status.st_ino))


def changed(before: dict[str, Entry], after: dict[str, Entry]) -> dict[str, tuple[object, object]]:
    """What is not as it was: path → how it was, how it is."""
    paths = before.keys() | after.keys()
    return {
        path: (before.get(path), after.get(path))
        for path in sorted(paths)
        if before.get(path) != after.get(path)
    }
