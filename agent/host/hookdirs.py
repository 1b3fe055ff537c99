"""HAMi-core's directories on the host: one per container, and one for its lock.

They are mounted into containers and writable by everybody there, so nothing in them is trusted:
every step is taken from an open directory and never through a link, and what lies above them
belongs to root and is writable by root alone.
"""

import contextlib
import datetime as dt
import errno
import itertools
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from agent.core.edits import HookFacts
from agent.core.errors import StateError
from agent.kit.offload import Offload
from agent.kit.writable import check_writable

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NAME = re.compile(r"[0-9a-f-]{1,64}_[a-z0-9]([-a-z0-9]*[a-z0-9])?")
PARENT_MODE = 0o755
LEAF_MODE = 0o777
"""No sticky bit: libvgpu.so up to 2.8.0 removes the stale lock of another user."""
LEFT_BEHIND = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}_[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""Names of container directories of pods that the API server knows or knew."""
ENTRY_LIMIT = 100_000
ADVICE = {
    errno.ENOENT: "make {hook}, a directory of root's",
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "raise the quota or free some space there",
    errno.EROFS: "mount it read-write",
    errno.ELOOP: "remove the link that is in its place",
    errno.ENOTDIR: "remove what is in its place: a link or a file",
    errno.EIO: "look for disk errors in the kernel's log",
}
CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


class HostHookDirs:
    """The HookDirs port below `hook`, HAMi's HOOK_PATH, which must be there.

    `dev` is where the host's device nodes are; `version` the version whose libvgpu.so is ours.
    """

    def __init__(self, hook: Path, dev: Path, version: str, offload: Offload) -> None:
        self._hook = hook
        self._dev = dev
        self._version = version
        self._offload = offload

    async def facts(self) -> HookFacts:
        """What lies in the hook directory now. Raises StateError.

        Source: HAMi pkg/device-plugin/nvidiadevice/nvinternal/plugin/server.go (mounts).
        """
        return await self._offload.call(self._facts)

    async def check(self) -> None:
        """Nothing, when container directories can be made, as far as a look without a write shows.

        Raises StateError.
        """
        await self._offload.call(self._check)

    def _facts(self) -> HookFacts:
        home = self._hook / "vgpu"
        versioned = home / f"libvgpu.so.{self._version}"
        with _told(self._hook):
            library = versioned if self._version and versioned.is_file() else home / "libvgpu.so"
            mounted = (library, home / "ld.so.preload")
            nodes = (self._dev / name for name in CONTROL_NODES)
            return HookFacts(
                library=str(library),
                missing=tuple(str(file) for file in mounted if not file.is_file()),
                has_license=(home / "license").exists(),
                device_nodes=tuple(str(node) for node in nodes if node.exists()),
                hook_path=str(self._hook),
            )

    async def prepare(self, name: str, *, wipe: bool) -> None:
        """Make the container directory `name` and the lock directory, both open to everybody.

        `wipe`: nothing of what was in the container directory stays. Raises StateError.
        """
        await self._offload.call(self._prepare, _checked(name), wipe)

    async def remove(self, name: str) -> None:
        """Remove the container directory `name`; absent is done. Raises StateError."""
        await self._offload.call(self._remove, _checked(name))

    async def found(self) -> Mapping[str, dt.datetime]:
        """The container directories that are there, and when each changed. Raises StateError.

        It is the change of the inode, which no container can set back or forward.
        """
        return await self._offload.call(self._found)

    def _prepare(self, name: str, wipe: bool) -> None:  # noqa: FBT001 -- prepare() names it
        with _told(self._hook), contextlib.ExitStack() as open_directories:
            hook = self._own(open_directories)
            home = _parent(open_directories, "vgpu", hook)
            containers = _parent(open_directories, "containers", home)
            for leaf, above in ((name, containers), ("lock", home)):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(leaf, LEAF_MODE, dir_fd=above)
                opened = _opened(open_directories, leaf, above)
                if stat.S_IMODE(os.fstat(opened).st_mode) != LEAF_MODE:
                    os.fchmod(opened, LEAF_MODE)
                if wipe and leaf == name:
                    _empty(opened)

    def _check(self) -> None:
        with _told(self._hook), contextlib.ExitStack() as open_directories:
            last, name = self._own(open_directories), str(self._hook)
            # What is missing is made in what is there; the lock's directory comes first.
            with contextlib.suppress(FileNotFoundError):
                last, name = _found_parent(open_directories, "vgpu", last), "vgpu"
                with contextlib.suppress(FileNotFoundError):
                    _opened(open_directories, "lock", last)
                last, name = _found_parent(open_directories, "containers", last), "containers"
            check_writable(last, name)

    def _own(self, open_directories: contextlib.ExitStack) -> int:
        """The open hook path, which nobody else may write. Raises StateError, OSError."""
        hook = _opened(open_directories, str(self._hook), None, os.O_DIRECTORY | os.O_CLOEXEC)
        if _owned(hook, str(self._hook)) & stat.S_IWOTH:
            raise StateError(
                f"Hook path {self._hook} is writable by everybody, who could put other "
                "directories in the place of the containers': make it 0755."
            )
        return hook

    def _remove(self, name: str) -> None:
        with _told(self._hook), contextlib.ExitStack() as open_directories:
            try:
                above = self._containers(open_directories)
                _empty(_opened(open_directories, name, above))
            except FileNotFoundError:
                return
            os.rmdir(name, dir_fd=above)

    def _found(self) -> Mapping[str, dt.datetime]:
        with _told(self._hook), contextlib.ExitStack() as open_directories:
            try:
                above = self._containers(open_directories)
            except FileNotFoundError:
                return {}
            with os.scandir(above) as entries:
                return dict(_changes(itertools.islice(entries, ENTRY_LIMIT)))

    def _containers(self, open_directories: contextlib.ExitStack) -> int:
        """The open directory of the container directories, as it is."""
        above = _opened(open_directories, str(self._hook), None, os.O_DIRECTORY)
        for step in ("vgpu", "containers"):
            above = _opened(open_directories, step, above)
        return above


def _changes(
    entries: "Iterator[os.DirEntry[str]]",
) -> Iterator[tuple[str, dt.datetime]]:
    """Directories, not links to some, with the names of containers' and the time of change."""
    for entry in entries:
        if LEFT_BEHIND.fullmatch(entry.name):
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    yield entry.name, dt.datetime.fromtimestamp(found.st_ctime, dt.UTC)


def _checked(name: str) -> str:
    if not NAME.fullmatch(name):
        raise StateError(f"{name[:80]!r} is no <pod UID>_<container>: no directory is made for it.")
    return name


def _opened(
    open_directories: contextlib.ExitStack, name: str, above: int | None, flags: int = DIRECTORY
) -> int:
    opened = os.open(name, flags, dir_fd=above)
    open_directories.callback(os.close, opened)
    return opened


def _parent(open_directories: contextlib.ExitStack, name: str, above: int) -> int:
    """The directory `name`, made if missing, owned by root or us and writable by its owner only."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, PARENT_MODE, dir_fd=above)
    opened = _opened(open_directories, name, above)
    if _owned(opened, name) != PARENT_MODE:
        os.fchmod(opened, PARENT_MODE)
    return opened


def _found_parent(open_directories: contextlib.ExitStack, name: str, above: int) -> int:
    """The directory `name` as it is, owned by root or us. Raises StateError, OSError."""
    opened = _opened(open_directories, name, above)
    _owned(opened, name)
    return opened


def _owned(opened: int, name: str) -> int:
    """The mode of an open directory that is root's or ours. Raises StateError."""
    found = os.fstat(opened)
    if found.st_uid not in {0, os.geteuid()}:
        raise StateError(
            f"Hook directory {name} belongs to uid {found.st_uid}: give it to root, or its owner "
            "decides what containers mount."
        )
    return stat.S_IMODE(found.st_mode)


def _empty(directory: int) -> None:
    """Remove everything in an open directory.

    Nested directories are pulled up and emptied one by one, so that no depth that a container
    builds takes more than two descriptors or any recursion.
    """
    prefix = secrets.token_hex(8)
    removed = 0
    while names := _names(directory):
        for name in names:
            removed += 1
            if removed > ENTRY_LIMIT:
                raise StateError(
                    f"A container directory has more than {ENTRY_LIMIT} entries: remove it by hand."
                )
            _remove_entry(directory, name, f"{prefix}-{removed}")


def _remove_entry(directory: int, name: str, prefix: str) -> None:
    """Remove one entry; what is in a nested directory moves up under names with `prefix`."""
    try:
        os.unlink(name, dir_fd=directory)
    except IsADirectoryError:
        nested = os.open(name, DIRECTORY, dir_fd=directory)
        try:
            for number, inner in enumerate(_names(nested)):
                os.rename(inner, f"{prefix}-{number}", src_dir_fd=nested, dst_dir_fd=directory)
        finally:
            os.close(nested)
        os.rmdir(name, dir_fd=directory)


def _names(directory: int) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in itertools.islice(entries, ENTRY_LIMIT)]


@contextlib.contextmanager
def _told(hook: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        usual = "make {hook} a directory of root's that the agent may write"
        advice = ADVICE.get(error.errno or 0, usual).format(hook=hook)
        raise StateError(
            f"HAMi-core's directories below {hook} cannot be used: {error.filename or 'an entry'}: "
            f"{error.strerror}; {advice}."
        ) from error
