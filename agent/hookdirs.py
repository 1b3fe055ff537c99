"""HAMi-core's directories on the host: made, set aside and removed, without following links."""

import asyncio
import contextlib
import datetime as dt
import errno
import itertools
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent.cluster import NodeEvent
from agent.errors import StateError
from agent.kit.cell import Cell
from agent.kit.disk import DIRECTORY, PLACE, check_writable, remove_stepwise, set_mode
from agent.kit.tasks import Offload
from agent.ledger import DIRECTORY_NAME, HookFacts

# What removing set-aside directories left: the Event about those that stay, and the room.

KEPT_EVENT: Final = "DirectoriesKept"


class Cleared(msgspec.Struct, frozen=True):
    """The result of one part of the work. `more`: there is more to do at once.

    `kept`: how many directories stay. `why`: the system's error for the first of them.
    """

    more: bool = False
    kept: int = 0
    why: str = ""


class DiskRoom(msgspec.Struct, frozen=True):
    """Free space on the directories' file system: bytes `available`, and free `inodes`.

    NaN: not known. Infinite inodes: the file system does not count them.
    """

    available: float = math.nan
    inodes: float = math.nan


def kept_event(cleared: Cleared) -> NodeEvent:
    """The Event that directories stay."""
    some = "a directory" if cleared.kept == 1 else f"{cleared.kept} directories"
    text = (
        f"The agent cannot remove {some} of containers that are gone ({cleared.why}). No pod waits "
        "for this. Remove them as root on the node: see DirectoriesKept in RUNBOOK.md."
    )
    return NodeEvent(KEPT_EVENT, text, warning=True)


# Opens HAMi-core's directories on the host, each from the one above it, through no link.

LISTED: Final = 100_000
"""Entries read beside the container directories; only root can create any there."""
SLICE_ENTRIES: Final = 1000
SLICE_SECONDS: Final = 0.05
"""One part of removing ends after so many entries or seconds."""
ADVICE = {
    errno.ENOENT: "make the directory {hook}, owned by root",
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "raise the quota or free some space there",
    errno.EROFS: "mount it read-write",
    errno.ELOOP: "remove the link in its place",
    errno.ENOTDIR: "remove the link or file in its place",
    errno.EIO: "look for disk errors in the kernel's log",
}


def open_in(
    open_directories: contextlib.ExitStack, name: str, above: int | None, flags: int = DIRECTORY
) -> int:
    """Open the directory `name` until the stack closes. Raises OSError."""
    opened = os.open(name, flags, dir_fd=above)
    open_directories.callback(os.close, opened)
    return opened


@contextlib.contextmanager
def open_containers(hook: Path) -> Iterator[int | None]:
    """Open the parent of the container directories; None: there is none yet. Raises StateError."""
    with state_errors(hook), contextlib.ExitStack() as open_directories:
        above: int | None
        try:
            above = open_in(open_directories, str(hook), None, os.O_DIRECTORY)
            for step in ("vgpu", "containers"):
                above = open_in(open_directories, step, above)
        except FileNotFoundError:
            above = None

        yield above


def names_in(above: int | None) -> list[str]:
    """The names of the entries in the parent of the container directories. Raises OSError."""
    if above is None:
        return []
    with os.scandir(above) as entries:
        return [entry.name for entry in itertools.islice(entries, LISTED)]


@contextlib.contextmanager
def state_errors(hook: Path) -> Iterator[None]:
    """Turn an OSError into a StateError that says what to do."""
    try:
        yield
    except OSError as error:
        usual = "make {hook} a directory that root owns and the agent may write"
        advice = ADVICE.get(error.errno or 0, usual).format(hook=hook)
        raise StateError(
            f"HAMi-core's directories below {hook} cannot be used: {error.filename or 'an entry'}: "
            f"{error.strerror}; {advice}."
        ) from error


# Measures the container directories when somebody asks; changes nothing, follows no link.

BYTES: Final = 256 * 2**20
ENTRIES: Final = 10_000
"""HAMi-core needs a few files of about 2 MiB. Counting ends here."""


class DirectorySize(msgspec.Struct, frozen=True):
    """The count of one directory.

    - `size`: allocated bytes. A sparse file counts its blocks, one of several names counts once.
    - `is_beyond`: it has more than HAMi-core can need, a directory in it, or something that may not
      be looked at. Counting ended there.
    """

    size: int = 0
    entries: int = 0
    is_beyond: bool = False


def directory_sizes(hook: Path) -> Mapping[str, DirectorySize]:
    """The size of each container directory below `hook`, by its name. Raises StateError."""
    found = dict[str, DirectorySize]()
    with open_containers(hook) as above:
        for name in filter(DIRECTORY_NAME.fullmatch, names_in(above)):
            # A container may remove or replace it meanwhile.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found[name] = _size_of(name, above)
    return found


def _size_of(name: str, above: int | None) -> DirectorySize:
    """Count the directory `name` in the open directory `above`. Raises OSError."""
    size = entries = 0
    try:
        with contextlib.ExitStack() as open_directories:
            opened = open_in(open_directories, name, above)
            for entry in open_directories.enter_context(os.scandir(opened)):
                entries += 1
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue

                size += status.st_blocks * 512 // max(status.st_nlink, 1)
                # HAMi-core makes no directory.
                if stat.S_ISDIR(status.st_mode) or size > BYTES or entries > ENTRIES:
                    return DirectorySize(size, entries, is_beyond=True)
    except PermissionError:
        return DirectorySize(size, entries, is_beyond=True)

    return DirectorySize(size, entries)


# Removes container directories that were set aside, in small parts.
#
# It runs on a thread of its own, so making a directory never waits for it.

ASIDE: Final = re.compile(r"\.removed-[0-9a-f]{1,64}-[0-9a-f]{16}")
"""The name of a directory set aside, with the pod's UID without its hyphens: HAMi's monitors up to
and including 2.6.1 crash on them."""
VISIT: Final = 100_000
"""Steps in one directory before the next one: a process may still write into it."""


class SetAside:
    """Removes the directories set aside below `hook`, and knows which cannot be removed."""

    def __init__(self, hook: Path) -> None:
        self._hook = hook
        self._kept: dict[str, str] = {}
        """Why each directory stays that could not be removed."""
        self._round: Iterator[None] | None = None

    def clear(self, again: bool, now: Callable[[], float]) -> Cleared:  # noqa: FBT001 -- for an Offload
        """Remove a bounded part; with `again`, also try what could not be removed before.

        Raises StateError.
        """
        end = now() + SLICE_SECONDS
        if again:
            self._kept = {}

        if self._round is None:
            self._round = self._remove()

        try:
            for _ in range(SLICE_ENTRIES):
                next(self._round)
                if now() > end:
                    break
        except StopIteration:
            self._round = None
        except StateError:
            self._round = None
            raise

        why = next(iter(self._kept.values()), "")
        return Cleared(more=self._round is not None, kept=len(self._kept), why=why)

    def _remove(self) -> Iterator[None]:
        """Remove all, but those that cannot be removed. Each step takes a few system calls."""
        while names := self._untried():
            for name in sorted(names):
                with open_containers(self._hook) as above:
                    try:
                        if above is not None:
                            yield from itertools.islice(remove_stepwise(name, above), VISIT)
                    except OSError as error:
                        self._kept[name] = error.strerror or "unknown error"

                yield

    def _untried(self) -> set[str]:
        with open_containers(self._hook) as above:
            names = set(filter(ASIDE.fullmatch, names_in(above)))
        # Somebody else may have removed one that stayed.
        self._kept = {name: why for name, why in self._kept.items() if name in names}
        return names - self._kept.keys()


# HAMi-core's directories on the host, one for each container.
#
# Containers mount them and any process in a container may write them, so their content is not
# trusted. Every step starts at an open directory and follows no link. Only root may write the
# directories above them. An unusable or unused directory is set aside by a rename, which no content
# can delay, and removed in small parts on a thread of its own.

PARENT_MODE = 0o755
LEAF_MODE = 0o777
"""No sticky bit: libvgpu.so up to and including 2.8.0 removes another user's stale lock."""
LEFT_BEHIND = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}_[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""Names of container directories of pods from the API server."""
UNUSABLE: Final = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP})
"""The errors of a directory whose access a tenant took away, or that was replaced."""
ELF_HEAD = 20
"""Bytes of an ELF header with its magic number, class (the fifth) and machine (the last two)."""
PRELOAD_LIMIT = 65536
CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


class HostHookDirs:
    """HAMi-core's directories below `hook`, HAMi's HOOK_PATH, which must exist.

    Link-safe; nothing outside is touched.

    `dev` holds the host's device nodes; `version` selects the libvgpu.so. `clearing` runs only
    clear() and room(); `offload` runs all others.
    """

    def __init__(
        self, hook: Path, dev: Path, version: str, offload: Offload, clearing: Offload
    ) -> None:
        self._hook = hook
        self._dev = dev
        self._version = version
        self._offload = offload
        self._clearing = clearing
        self._aside = SetAside(hook)
        self.set_aside: Cell[int] = Cell(0)
        """The number of directories set aside since the start."""

    async def facts(self) -> HookFacts:
        """Inspect the hook directory. Raises StateError.

        Source: HAMi pkg/device-plugin/nvidiadevice/nvinternal/plugin/server.go (mounts).
        """
        return await self._offload.call(self._facts)

    async def check(self) -> None:
        """Check without writing that container directories can be made. Raises StateError."""
        await self._offload.call(self._check)

    def _facts(self) -> HookFacts:
        home = self._hook / "vgpu"
        versioned = [home / f"libvgpu.so.{self._version}"] if self._version else []
        libraries, preload = [*versioned, home / "libvgpu.so"], home / "ld.so.preload"

        with state_errors(self._hook):
            library = next(filter(Path.is_file, libraries), libraries[-1])
            nodes = (self._dev / name for name in CONTROL_NODES)
            missing = tuple(str(file) for file in (library, preload) if not file.is_file())
            readable = () if missing else (library, Path("/proc/self/exe"))
            head, own = [_head(file, ELF_HEAD) for file in readable] or (None, None)
            text = None if missing else _head(preload, PRELOAD_LIMIT)
            return HookFacts(
                library=str(library),
                missing=missing,
                loadable=head is None or own is None or head[:5] + head[18:] == own[:5] + own[18:],
                preload=None if text is None else text.decode(errors="surrogateescape"),
                has_license=preload.with_name("license").exists(),
                device_nodes=tuple(str(node) for node in nodes if node.exists()),
                hook_path=str(self._hook),
            )

    async def prepare(self, name: str, *, wipe: bool) -> None:
        """Make the container directory `name`, writable by everybody. Raises StateError.

        With `wipe`, no old content stays. Without, a container may run with it: an existing
        directory stays, and only something else in its place is replaced.
        """
        _check_name(name)
        await self._counted(lambda: self._prepare(name, wipe=wipe))

    async def remove(self, name: str) -> None:
        """Set the container directory `name` aside, if it exists. Raises StateError."""
        _check_name(name)
        await self._counted(lambda: self._remove(name))

    async def _counted(self, work: Callable[[], int]) -> None:
        """Run the work and count what it sets aside: one if the caller is cancelled before."""
        aside = 1
        try:
            aside = await self._offload.call(work)
        finally:
            self.set_aside.set(self.set_aside.value + aside)

    async def found(self) -> Mapping[str, dt.datetime]:
        """Return the container directories and when the inode of each changed. Raises StateError.

        No container can set that time.
        """
        return await self._offload.call(self._found)

    async def clear(self, *, again: bool) -> Cleared:
        """Remove a bounded part of what was set aside. Raises StateError.

        With `again`, also try what could not be removed before.
        """
        now = asyncio.get_running_loop().time
        return await self._clearing.call(self._aside.clear, again, now)

    async def room(self) -> DiskRoom:
        """Return the free space and inodes of their file system. Raises StateError."""
        return await self._clearing.call(self._room)

    def _room(self) -> DiskRoom:
        with state_errors(self._hook):
            system = os.statvfs(self._hook)
            # Each of these can be a mount. A missing one would be made in the one above it.
            with contextlib.suppress(FileNotFoundError):
                system = os.statvfs(self._hook / "vgpu")
                system = os.statvfs(self._hook / "vgpu" / "containers")
        inodes = float(system.f_favail) if system.f_files else math.inf
        return DiskRoom(float(system.f_bavail * system.f_frsize), inodes)

    def _prepare(self, name: str, *, wipe: bool) -> int:
        aside = 0
        with state_errors(self._hook), contextlib.ExitStack() as open_directories:
            hook = self._own(open_directories)
            home = _parent(open_directories, "vgpu", hook)
            containers = _parent(open_directories, "containers", home)
            try:
                os.mkdir(name, LEAF_MODE, dir_fd=containers)
            except FileExistsError:
                # A container may have it mounted, with the files that limit the container.
                status = os.stat(name, dir_fd=containers, follow_symlinks=False)
                if wipe or not stat.S_ISDIR(status.st_mode):
                    _set_aside(name, containers)
                    aside = 1
                    os.mkdir(name, LEAF_MODE, dir_fd=containers)

            try:
                set_mode(open_in(open_directories, name, containers, PLACE), LEAF_MODE)
            except OSError as error:
                if error.errno not in UNUSABLE:
                    raise
                raise StateError(
                    f"Container directory {name} cannot be used: a container changed its owner or "
                    "its access. The container cannot start: delete the pod."
                ) from error

        return aside

    def _check(self) -> None:
        with state_errors(self._hook), contextlib.ExitStack() as open_directories:
            last, name = self._own(open_directories), str(self._hook)
            # A missing directory would be made in the last existing one.
            with contextlib.suppress(FileNotFoundError):
                for below in ("vgpu", "containers"):
                    last, name = open_in(open_directories, below, last), below
                    _owned(last, name)
            check_writable(last, name)

    def _own(self, open_directories: contextlib.ExitStack) -> int:
        """Open the hook path, which no other user may write. Raises StateError, OSError."""
        hook = open_in(open_directories, str(self._hook), None, os.O_DIRECTORY | os.O_CLOEXEC)
        if _owned(hook, str(self._hook)) & stat.S_IWOTH:
            raise StateError(
                f"Hook path {self._hook} is writable by everybody: any user could replace the "
                "directories of containers. Make it 0755."
            )
        return hook

    def _remove(self, name: str) -> int:
        with open_containers(self._hook) as above:
            if above is None:
                return 0
            try:
                _set_aside(name, above)
            except FileNotFoundError:
                return 0
        return 1

    def _found(self) -> Mapping[str, dt.datetime]:
        found = {}
        with open_containers(self._hook) as above:
            for name in filter(LEFT_BEHIND.fullmatch, names_in(above)):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=above, follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        found[name] = dt.datetime.fromtimestamp(status.st_ctime, dt.UTC)
        return found


def _head(file: Path, size: int) -> bytes | None:
    """The first `size` bytes; None if they cannot be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(size)
    except OSError:
        return None


def _check_name(name: str) -> None:
    if not DIRECTORY_NAME.fullmatch(name):
        raise StateError(
            f"{name[:80]!r} is not of the form <pod UID>_<container>: no directory is made for it."
        )


def _parent(open_directories: contextlib.ExitStack, name: str, above: int) -> int:
    """Open the directory `name`, or make it: owned by root or us, writable only by its owner."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, PARENT_MODE, dir_fd=above)
    opened = open_in(open_directories, name, above)
    if _owned(opened, name) != PARENT_MODE:
        os.fchmod(opened, PARENT_MODE)
    return opened


def _owned(opened: int, name: str) -> int:
    """The mode of an open directory that root or we must own. Raises StateError."""
    status = os.fstat(opened)
    if status.st_uid not in {0, os.geteuid()}:
        raise StateError(
            f"Hook directory {name} belongs to uid {status.st_uid}, who could decide what "
            "containers mount: give it to root."
        )
    return stat.S_IMODE(status.st_mode)


def _set_aside(name: str, above: int) -> None:
    """Rename the entry within its parent: its own mode does not matter. Raises OSError."""
    aside = f".removed-{name.partition('_')[0].replace('-', '')}-{secrets.token_hex(8)}"
    os.rename(name, aside, src_dir_fd=above, dst_dir_fd=above)
