"""Inspects device files, HAMi-core's files and the agents on this host; it changes nothing."""

import errno
import hashlib
import itertools
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Final

from agent.core.node.device_access import CONTROL, DeviceNode, NodeAccess
from agent.core.node.library_files import LibraryFile

FILE_LIMIT: Final = 64 * 1024 * 1024
"""Bytes of a library; HAMi-core's has less than 1 MiB."""
_BYTECODE_HEAD: Final = struct.Struct("<4x3L")
"""Of a file with bytecode (PEP 552): flags; if they are 0, time and size of the source."""
_NSPID: Final = re.compile("^NSpid:(.*)$", re.MULTILINE)
_GPU: Final = re.compile(r"nvidia[0-9]+")
_DENIALS: Final = {
    # open(2): EACCES is the file's mode, EPERM a device cgroup that has no rule for it.
    errno.EACCES: NodeAccess.DENIED,
    errno.EPERM: NodeAccess.FORBIDDEN,
    errno.ENOENT: NodeAccess.MISSING,
}


def device_nodes(directory: Path) -> tuple[DeviceNode, ...]:
    """The device files of NVIDIA's driver in `directory`.

    Those that every program opens are opened and closed; those of GPUs are not, which would wake
    them.
    """
    control = [_opened(directory / name) for name in CONTROL]
    try:
        gpus = sorted(path for path in directory.iterdir() if _GPU.fullmatch(path.name))
    except OSError:
        gpus = []
    return (*control, *(DeviceNode(str(path), NodeAccess.SEEN) for path in gpus))


def library_file(path: Path) -> LibraryFile:
    """Read owner, mode and digest of a file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return LibraryFile(str(path), failure=f"cannot be read: {error.strerror}")
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        return LibraryFile(str(path), failure="is not a regular file")
    with os.fdopen(handle, "rb") as file:
        content = file.read(FILE_LIMIT)
    return LibraryFile(
        str(path),
        owner=status.st_uid,
        mode=stat.S_IMODE(status.st_mode),
        ours=status.st_uid in {0, os.geteuid()},
        digest=hashlib.sha256(content).hexdigest(),
    )


def uncompiled(modules: Iterable[ModuleType]) -> int:
    """How many of these modules have no valid bytecode on disk, so that each start compiles them.

    Python writes it when it loads a module, unless it may not.
    """
    specs = [getattr(module, "__spec__", None) for module in modules]
    return sum(not _is_compiled(spec) for spec in specs if isinstance(spec, ModuleSpec))


def waiting_agents(run: Path, holder: str, processes: Path) -> tuple[int, ...]:
    """The agents with the run directory `run` that do not hold the lock, by process id.

    `holder`: the text of the lock file; `processes`: /proc. Only an agent that names its run
    directory by a flag, or has the default one, is recognised.
    """
    found = dict(_agents(run, processes))
    pid = holder.removeprefix("pid ").strip()
    waiting = {number for number, ids in found.items() if pid not in ids}
    # A holder in another PID namespace is not seen, or by another number.
    return tuple(sorted(waiting)) if len(waiting) < len(found) else ()


def _is_compiled(spec: ModuleSpec) -> bool:
    if not isinstance(spec.loader, SourceFileLoader) or spec.cached is None:
        return True  # it needs no bytecode
    source = Path(spec.loader.path)
    try:
        with Path(spec.cached).open("rb") as file:
            flags, date, size = _BYTECODE_HEAD.unpack(file.read(_BYTECODE_HEAD.size))
        status = source.stat()
    except (OSError, struct.error):
        return False
    return bool(flags) or (date, size) == (int(status.st_mtime) & 0xFFFFFFFF, status.st_size)


def _opened(path: Path) -> DeviceNode:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        access = _DENIALS.get(error.errno or 0, NodeAccess.FAILED)
        reason = (error.strerror or "") if access is NodeAccess.FAILED else ""
        return DeviceNode(str(path), access, reason)
    os.close(handle)
    return DeviceNode(str(path), NodeAccess.OPEN)


def _agents(run: Path, processes: Path) -> Iterator[tuple[int, Sequence[str]]]:
    """Each agent's process id, with its ids in all PID namespaces."""
    for entry in processes.iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                status = (entry / "status").read_text(errors="replace")
            except OSError:  # it ended
                continue
            if _is_agent(words) and _run_directory(words) == str(run):
                ids = _NSPID.search(status)
                yield int(entry.name), ids[1].split() if ids else [entry.name]


def _is_agent(words: Sequence[str]) -> bool:
    """Whether the words are `hami-agent run` or `python -m agent run`, and not only observe."""
    for place, word in enumerate(words[:-1]):
        named = word.rpartition("/")[2] == "hami-agent"
        module = words[place - 1 : place + 1] == ["-m", "agent"]
        if (named or module) and words[place + 1] == "run":
            return "--observe" not in words
    return False


def _run_directory(words: Sequence[str]) -> str:
    """The value of --run-dir, or the default."""
    flag = "--run-dir"
    for word, value in itertools.pairwise((*words, "")):
        if word == flag or word.startswith(f"{flag}="):
            return value if word == flag else word.partition("=")[2]
    return "/run/hami-agent"
