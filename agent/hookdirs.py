"""HAMi-core's directories on the host: made, set aside and removed, without following links.

Any process in a container may write them. So every step starts at an open directory and follows no
link. Only root may write the directories above. An unusable or unused directory is set aside by a
rename, which no content can delay, and removed in passes on a thread of its own.
"""

import asyncio
import contextlib
import itertools
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final, NoReturn

import msgspec
import structlog

from agent.errors import AgentError, StateError
from agent.kit.cell import Cell
from agent.kit.disk import DIRECTORY, PLACE, check_writable, remove_stepwise, set_mode
from agent.kit.tasks import Offload
from agent.kit.timing import await_event, loop_time, until_tick
from agent.ledger import DIRECTORY_NAME, HookFacts

log = structlog.get_logger(__name__)

LISTED: Final = 100_000  # entries read beside the container directories; only root can make any


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
        raise StateError(
            f"HAMi-core's directories below {hook} cannot be used: {error.filename or 'an entry'}: "
            f"{error.strerror}; {hook} must be a directory of root's, without links in it, on a "
            "disk that has room. If a pod changed its own directory, delete the pod."
        ) from error


BYTES: Final = 256 * 2**20
ENTRIES: Final = 10_000  # HAMi-core needs a few files of about 2 MiB. Counting ends here


def large_directories(hook: Path) -> list[tuple[int, int, str]]:
    """The container directories with more than HAMi-core needs, the largest first.

    Each with its bytes, entries and name. More is: more than BYTES or ENTRIES, a directory, or what
    may not be looked at. Counting ends there. Raises StateError.
    """
    found: list[tuple[int, int, str]] = []
    with open_containers(hook) as above:
        for name in filter(DIRECTORY_NAME.fullmatch, names_in(above)):
            size = entries = 0
            try:
                with contextlib.ExitStack() as opened:
                    directory = open_in(opened, name, above)
                    scanned = opened.enter_context(os.scandir(directory))
                    for entry in itertools.islice(scanned, ENTRIES + 1):
                        entries += 1
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            size += status.st_blocks * 512 // max(status.st_nlink, 1)
                            if stat.S_ISDIR(status.st_mode) or size > BYTES or entries > ENTRIES:
                                found.append((size, entries, name))
                                break
            except PermissionError:
                found.append((size, entries, name))
            except (FileNotFoundError, NotADirectoryError):
                continue  # the container removed or replaced it meanwhile
    return sorted(found, reverse=True)


PARENT_MODE = 0o755
LEAF_MODE = 0o777  # no sticky bit: libvgpu.so <= 2.8.0 removes another user's stale lock
ASIDE: Final = re.compile(r"\.removed-[0-9a-f]{1,64}-[0-9a-f]{16}")
"""The name of a directory set aside, with the pod's UID without its hyphens: HAMi's monitors up to
and including 2.6.1 crash on them."""
STEPS: Final = 10_000
"""Steps in one directory in one pass: a process may still write into it, and others wait. A pass
over what stays needs fewer: it is given up after FAILURES (kit/disk) entries."""
AGAIN: Final = 3600.0  # seconds between attempts to remove what stays: they can be costly
PASS: Final = 0.5  # seconds after which a pass begins no further directory: others need the disk
ELF_HEAD = 20  # bytes with the magic number, the class (the fifth) and the machine (the last two)
PRELOAD_LIMIT = 65536
CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


class Cleared(msgspec.Struct, frozen=True):
    """What one pass over the directories that were set aside left.

    - `more`: a directory is not finished, or was not reached.
    - `kept`: how many cannot be removed. `why`: the system's error for the first of them.
    """

    more: bool = False
    kept: int = 0
    why: str = ""


class HostHookDirs:
    """HAMi-core's directories below `hook`, HAMi's HOOK_PATH, which must exist.

    `dev` holds the host's device nodes; `version` selects the libvgpu.so. `clearing` runs only
    clear(), so that making a directory never waits for a removal; `offload` runs all others.
    """

    def __init__(
        self, hook: Path, dev: Path, version: str, offload: Offload, clearing: Offload
    ) -> None:
        self._hook = hook
        self._dev = dev
        self._version = version
        self._offload = offload
        self._clearing = clearing
        # Why each directory stays that could not be removed, and the loop time of the attempt.
        self._kept: dict[str, tuple[str, float]] = {}
        self._last = ""  # the last directory of the last pass. The next pass begins behind it
        self.set_aside = asyncio.Event()  # something may have been set aside since the last pass

    async def facts(self) -> HookFacts:
        """Inspect the hook directory, as HAMi's server.go does for mounts. Raises StateError."""
        return await self._offload.call(self._facts)

    async def check(self) -> None:
        """Check without writing that container directories can be made. Raises StateError."""
        await self._offload.call(self._check)

    async def prepare(self, name: str, *, wipe: bool) -> None:
        """Make the container directory `name`, writable by everybody. Raises StateError.

        With `wipe`, no old content stays. Without, a container may run with it: an existing
        directory stays, and only something else in its place is replaced.
        """
        _check_name(name)
        await self._offload.call(self._prepare, name, wipe)

    async def remove(self, name: str) -> None:
        """Set the container directory `name` aside, if it exists. Raises StateError."""
        _check_name(name)
        await self._offload.call(self._remove, name)
        self.set_aside.set()

    async def found(self) -> Collection[str]:
        """Return the names of the container directories. Raises StateError."""
        return await self._offload.call(self._found)

    async def clear(self) -> Cleared:
        """Make one pass over what was set aside. Raises StateError."""
        return await self._clearing.call(self._clear, asyncio.get_running_loop().time)

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
                hook_path=str(self._hook).rstrip("/"),
            )

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

    def _prepare(self, name: str, wipe: bool) -> None:  # noqa: FBT001 -- for an Offload
        with state_errors(self._hook), contextlib.ExitStack() as open_directories:
            above = self._own(open_directories)
            for parent in ("vgpu", "containers"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(parent, PARENT_MODE, dir_fd=above)
                above = open_in(open_directories, parent, above)
                if _owned(above, parent) != PARENT_MODE:
                    os.fchmod(above, PARENT_MODE)

            try:
                os.mkdir(name, LEAF_MODE, dir_fd=above)
            except FileExistsError:
                # A container may have it mounted, with the files that limit the container.
                status = os.stat(name, dir_fd=above, follow_symlinks=False)
                if wipe or not stat.S_ISDIR(status.st_mode):
                    _set_aside(name, above)
                    os.mkdir(name, LEAF_MODE, dir_fd=above)

            set_mode(open_in(open_directories, name, above, PLACE), LEAF_MODE)

    def _remove(self, name: str) -> None:
        with open_containers(self._hook) as above, contextlib.suppress(FileNotFoundError):
            if above is not None:
                _set_aside(name, above)

    def _found(self) -> Collection[str]:
        found = []
        with open_containers(self._hook) as above:
            for name in filter(DIRECTORY_NAME.fullmatch, names_in(above)):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=above, follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        found.append(name)
        return found

    def _clear(self, now: Callable[[], float]) -> Cleared:
        more = False
        with open_containers(self._hook) as above:
            if above is not None:
                names = set(filter(ASIDE.fullmatch, names_in(above)))
                # Somebody else may have removed one that stayed.
                self._kept = {
                    name: (why, at)
                    for name, (why, at) in self._kept.items()
                    if name in names and now() - at < AGAIN
                }

                untried, end = names - self._kept.keys(), now() + PASS
                for name in sorted(untried, key=lambda name: (name <= self._last, name)):
                    if now() > end:
                        more = True
                        break
                    self._last = name
                    try:
                        steps = itertools.islice(remove_stepwise(name, above), STEPS)
                        more |= sum(1 for _ in steps) == STEPS
                    except OSError as error:
                        self._kept[name] = error.strerror or "unknown error", now()

        why = next((why for why, _ in self._kept.values()), "")
        return Cleared(more=more, kept=len(self._kept), why=why)


def _head(file: Path, size: int) -> bytes | None:
    """The first `size` bytes; None if they cannot be read."""
    with contextlib.suppress(OSError), file.open("rb") as opened:
        return opened.read(size)
    return None


def _check_name(name: str) -> None:
    if not DIRECTORY_NAME.fullmatch(name):
        raise StateError(
            f"{name[:80]!r} is not of the form <pod UID>_<container>: no directory is made for it."
        )


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


PERIOD: Final = 60.0  # seconds between two passes when nothing was set aside
DEADLINE: Final = 30.0  # seconds for one pass. A single file can have terabytes


async def clear_directories(hooks: HostHookDirs, cleared: Cell[Cleared]) -> NoReturn:
    """Make passes for ever, when something was set aside and each minute; sole writer of `cleared`.

    It logs once that directories stay, until none stays.
    """
    while True:
        hooks.set_aside.clear()
        began, before = loop_time(), cleared.value
        try:
            async with asyncio.timeout(DEADLINE):
                now = await hooks.clear()
        except (AgentError, TimeoutError) as error:
            log.warning("hooks.not_cleared", err=str(error) or "out of time")
            now = Cleared(kept=before.kept)

        if now.kept and not before.kept:
            log.warning("hooks.kept", directories=now.kept, err=now.why)

        cleared.set(now)
        # Others have the disk half of the time.
        await asyncio.sleep(loop_time() - began)
        if not now.more:
            await await_event(hooks.set_aside, until_tick(PERIOD))
