"""What lies on the node outside the tenants' own directories, to see that nothing changes it."""

import hashlib
import os
import re
import stat
from pathlib import Path

from agent.sandbox.lab.places import Places

Entry = tuple[str, ...]
STATE = re.compile(r"\.?(state|journal)\..*")
"""The agent's own files, written anew with pods and refusals, under changing names."""
REPLACED = frozenset({"kubelet_internal_checkpoint", "lock"})
"""Written anew by the kubelet with every pod; by an agent that starts, which tells its process."""
CHANCE = re.compile(r"-[0-9a-f]{8}\.sock$")
"""The end of a socket's name that is another one with every kubelet."""


def snapshot(places: Places, *others: Path) -> dict[str, Entry]:
    """Every path with its type, mode, owner, number of names, inode and content.

    Of the directory above the containers' all is left out but what is named in `others`, which is
    taken whole; of sockets, and of files that are replaced with every pod, inode and content are.
    """
    found: dict[str, Entry] = {}
    containers = places.hook / "vgpu" / "containers"
    for above, folders, files in os.walk(places.root):
        here = Path(above)
        if here in {containers, places.cgroup}:
            folders.clear()
            continue
        for name in (*folders, *files):
            if here == places.state and STATE.fullmatch(name):
                continue
            found[CHANCE.sub("-*.sock", str(here / name))] = _entry(here / name)
    for other in others:
        for path in (other, *other.rglob("*")):
            found[str(path)] = _entry(path)
    found[str(places.state / "*")] = tuple(sorted(_states(places.state)))
    return found


def _states(directory: Path) -> set[str]:
    """Type, mode and owner of all files of the agent's state: they have the same."""
    found = set()
    for path in directory.iterdir():
        if STATE.fullmatch(path.name):
            try:
                found.add(" ".join(_owned(path.lstat())))
            except FileNotFoundError:
                continue  # it has its next name by now
    return found


def _owned(status: os.stat_result) -> Entry:
    return (stat.filemode(status.st_mode), str(status.st_uid), str(status.st_gid))


def _entry(path: Path) -> Entry:
    """What must stay as it is; a directory's size and times follow what is in it."""
    status = path.lstat()
    fixed = _owned(status)
    if path.name in REPLACED or stat.S_ISSOCK(status.st_mode):
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
