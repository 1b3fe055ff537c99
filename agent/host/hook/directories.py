"""HAMi-core's directories on the host: one for each container.

They are mounted into containers and writable by everybody there, so nothing in them is trusted:
every step is taken from an open directory and never through a link, and what lies above them
belongs to root and is writable by root alone. What cannot be used, or is used no more, is set aside
by a rename, which no content can hold up, and goes bit by bit on a thread of its own.
"""

import asyncio
import contextlib
import datetime as dt
import errno
import itertools
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVarTuple

from agent.core.containers.edits import HookFacts
from agent.core.errors import StateError
from agent.core.reconcile.clearing import Cleared
from agent.core.reconcile.measuring import DirectorySize, DiskRoom
from agent.host.hook.path import LISTED, open_containers, open_in, told
from agent.host.hook.set_aside import SetAside
from agent.host.hook.sizes import Sizes
from agent.kit.cell import Cell
from agent.kit.dissolve import PLACE, set_mode
from agent.kit.offload import Offload
from agent.kit.writable import check_writable

Ts = TypeVarTuple("Ts")

NAME = re.compile(r"[0-9a-f-]{1,64}_[a-z0-9]([-a-z0-9]*[a-z0-9])?")
PARENT_MODE = 0o755
LEAF_MODE = 0o777
"""No sticky bit: libvgpu.so up to 2.8.0 removes the stale lock of another user."""
LEFT_BEHIND = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}_[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""Names of container directories of pods that the API server knows or knew."""
UNUSABLE: Final = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP})
"""What a directory answers that its tenant, or something else in its place, keeps us out of."""
CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


class HostHookDirs:
    """The HookDirs port below `hook`, HAMi's HOOK_PATH, which must be there.

    `dev` is where the host's device nodes are; `version` the version whose libvgpu.so is ours.
    Only clear(), measure() and room() run on `clearing`, and nothing else does.
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
        self._sizes = Sizes(hook)
        self.set_aside: Cell[int] = Cell(0)
        """How many directories were set aside since the start."""

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
        with told(self._hook):
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
        """Make the container directory `name`, open to everybody.

        `wipe`: nothing of what was in it stays. Else a container may run with it: one that is there
        stays as it is, and only what is no directory is replaced. Raises StateError.
        """
        await self._counted(self._prepare, _checked(name), wipe)

    async def remove(self, name: str) -> None:
        """Take the container directory `name` away; absent is done. Raises StateError."""
        await self._counted(self._remove, _checked(name))

    async def _counted(self, work: Callable[[*Ts], int], *args: *Ts) -> None:
        """Count what the work sets aside; one where nobody waits for its end, which comes yet."""
        aside = 1
        try:
            aside = await self._offload.call(work, *args)
        finally:
            self.set_aside.set(self.set_aside.value + aside)

    async def found(self) -> Mapping[str, dt.datetime]:
        """The container directories that are there, and when each changed. Raises StateError.

        It is the change of the inode, which no container can set back or forward.
        """
        return await self._offload.call(self._found)

    async def clear(self, *, again: bool) -> Cleared:
        """Remove a bounded part of what was set aside. Raises StateError.

        `again`: what could not be removed is tried once more.
        """
        now = asyncio.get_running_loop().time
        return await self._clearing.call(self._aside.clear, again, now)

    async def measure(self, name: str, *, anew: bool) -> DirectorySize:
        """What the container directory `name` holds, after a look at a bounded part of it.

        `anew`: at the first part. One that is absent holds nothing. Raises StateError.
        """
        now = asyncio.get_running_loop().time
        return await self._clearing.call(self._sizes.measure, _checked(name), anew, now)

    async def room(self) -> DiskRoom:
        """What is left on their file system. Raises StateError."""
        return await self._clearing.call(self._sizes.room)

    def _prepare(self, name: str, wipe: bool) -> int:  # noqa: FBT001 -- prepare() names it
        """How many were set aside."""
        aside = 0
        with told(self._hook), contextlib.ExitStack() as open_directories:
            hook = self._own(open_directories)
            home = _parent(open_directories, "vgpu", hook)
            containers = _parent(open_directories, "containers", home)
            try:
                os.mkdir(name, LEAF_MODE, dir_fd=containers)
            except FileExistsError:
                # Of one that is held nothing may go: what is mounted there limits the container.
                found = os.stat(name, dir_fd=containers, follow_symlinks=False)
                if wipe or not stat.S_ISDIR(found.st_mode):
                    _set_aside(name, containers)
                    aside = 1
                    os.mkdir(name, LEAF_MODE, dir_fd=containers)
            if not _is_usable(name, containers):
                raise StateError(f"A container gave its directory {name} away: delete the pod.")
        return aside

    def _check(self) -> None:
        with told(self._hook), contextlib.ExitStack() as open_directories:
            last, name = self._own(open_directories), str(self._hook)
            # What is missing is made in what is there.
            with contextlib.suppress(FileNotFoundError):
                last, name = _found_parent(open_directories, "vgpu", last), "vgpu"
                last, name = _found_parent(open_directories, "containers", last), "containers"
            check_writable(last, name)

    def _own(self, open_directories: contextlib.ExitStack) -> int:
        """The open hook path, which nobody else may write. Raises StateError, OSError."""
        hook = open_in(open_directories, str(self._hook), None, os.O_DIRECTORY | os.O_CLOEXEC)
        if _owned(hook, str(self._hook)) & stat.S_IWOTH:
            raise StateError(
                f"Hook path {self._hook} is writable by everybody, who could put other "
                "directories in the place of the containers': make it 0755."
            )
        return hook

    def _remove(self, name: str) -> int:
        """How many were set aside."""
        with told(self._hook), contextlib.ExitStack() as open_directories:
            try:
                _set_aside(name, open_containers(self._hook, open_directories))
            except FileNotFoundError:
                return 0
        return 1

    def _found(self) -> Mapping[str, dt.datetime]:
        with told(self._hook), contextlib.ExitStack() as open_directories:
            try:
                above = open_containers(self._hook, open_directories)
            except FileNotFoundError:
                return {}
            with os.scandir(above) as entries:
                return dict(_changes(itertools.islice(entries, LISTED)))


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


def _parent(open_directories: contextlib.ExitStack, name: str, above: int) -> int:
    """The directory `name`, made if missing, owned by root or us and writable by its owner only."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, PARENT_MODE, dir_fd=above)
    opened = open_in(open_directories, name, above)
    if _owned(opened, name) != PARENT_MODE:
        os.fchmod(opened, PARENT_MODE)
    return opened


def _found_parent(open_directories: contextlib.ExitStack, name: str, above: int) -> int:
    """The directory `name` as it is, owned by root or us. Raises StateError, OSError."""
    opened = open_in(open_directories, name, above)
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


def _is_usable(name: str, above: int) -> bool:
    """Whether everybody can use the directory, after its mode was put right. Raises OSError."""
    try:
        place = os.open(name, PLACE, dir_fd=above)
        try:
            set_mode(place, LEAF_MODE)
        finally:
            os.close(place)
    except OSError as error:
        if error.errno in UNUSABLE:
            return False
        raise
    return True


def _set_aside(name: str, above: int) -> None:
    """Rename what is there, in its own parent, where the directory's mode does not matter.

    Raises OSError.
    """
    aside = f".removed-{name.partition('_')[0].replace('-', '')}-{secrets.token_hex(8)}"
    os.rename(name, aside, src_dir_fd=above, dst_dir_fd=above)
