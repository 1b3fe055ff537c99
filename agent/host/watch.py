"""Directories: which of their files appear, go, or are made anew, and where it counts, written.

The kubelet's device plugin directory with its sockets, and the directories of settings files.
Settings may lie on a file system that hangs: they are looked at on another thread. The kubelet's
directory is on the node's own disk, and an Allocate needs to know of it at once: on the loop.
"""

import asyncio
import contextlib
import dataclasses
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar, TypeVarTuple

import structlog
from asyncinotify import Event, Inotify, Mask, Watch
from typing_extensions import override

from agent.core.errors import KubeletError
from agent.core.state.holdings import KubeletEpoch
from agent.kit.offload import Offload

log = structlog.get_logger(__name__)

POLL = 5.0
"""Seconds between two looks at the files themselves: what inotify missed is seen then."""
ANSWER = 5.0
"""Seconds for one look at settings files; a file system that is slower is asked again later."""
COMES_OR_GOES = Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO
ENDS = Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT | Mask.IGNORED
EVERYTHING = ""
SWAPPED = "..data"
"""What the kubelet puts another link in the place of when it renews a mounted ConfigMap."""
Look = dict[str, KubeletEpoch | None]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class DirectoryWatch:
    """The SocketWatch port on `directory`.

    Only `names` are reported, exactly as written; they are asked for at every event, so that they
    may change. `kubelet` is the name of the kubelet's own socket.
    """

    _mask = COMES_OR_GOES

    def __init__(
        self, directory: Path, names: Callable[[], Collection[str]], kubelet: str = "kubelet.sock"
    ) -> None:
        self._directory = directory
        self._names = names
        self._kubelet = kubelet
        self._polled = ""

    def epoch(self) -> KubeletEpoch | None:
        """The kubelet's socket as it is now, or None when there is none. Raises KubeletError."""
        return self._seen(self._kubelet)

    def exists(self, name: str) -> bool:
        """True when `name` is there. Raises KubeletError."""
        return self._seen(name) is not None

    async def changes(self) -> AsyncGenerator[str, None]:
        """Names that appeared or went; an empty one, which also comes first, means: look anew.

        The directory may be missing, come and be replaced. Never ends. Raises KubeletError.
        """
        while True:
            async with self._watching() as sight:
                self._tell_polling(sight.obstacle)
                seen = await self._ask(self._look, tuple(self._names())) or {}
                yield EVERYTHING
                while not sight.is_over:
                    for name in await self._news(await sight.events(), sight, seen):
                        yield name

    async def _ask(self, work: Callable[[*Ts], R], *args: *Ts) -> R | None:
        """What `work(*args)`, which looks at files, returns. None: they do not answer."""
        return work(*args)

    @contextlib.asynccontextmanager
    async def _watching(self) -> AsyncIterator["_Sight"]:
        """Watch the directory and, to see it come and go, its parent; or only look now and then."""
        loop = asyncio.get_running_loop()
        with contextlib.closing(_Opening(self._directory, self._mask)) as opening:
            opened = await self._ask(opening.open)
            if not isinstance(opened, _Opened):
                opening.close()  # this spell is not for events that come late
                yield _Sight(obstacle=opened or "no answer")
                return
            sight = _Sight(opened.inotify, opened.parent)
            loop.add_reader(opened.inotify.fd, sight.wake)
            try:
                yield sight
            finally:
                loop.remove_reader(opened.inotify.fd)

    def _tell_polling(self, obstacle: str) -> None:
        """Say why the files are only looked at now and then, once for each reason."""
        if obstacle and obstacle != self._polled:
            log.info("watch.polling", directory=str(self._directory), err=obstacle)
        self._polled = obstacle

    async def _news(self, events: list[Event], sight: "_Sight", seen: Look) -> list[str]:
        """What the events say, or where there are none, a look at the files; `seen` follows."""
        if not events:
            return await self._differences(sight, seen)
        news = []
        named = []
        for event in events:
            name = str(event.name)
            if Mask.Q_OVERFLOW in event.mask:
                log.warning("watch.overflow", directory=str(self._directory))
                news.append(EVERYTHING)
            elif event.mask & ENDS or (event.watch is sight.parent and self._is_itself(name)):
                sight.is_over = True
            elif (
                event.watch is not sight.parent
                and name in self._names()
                and event.mask & self._mask
            ):
                named.append((name, event.mask))
        # Without an answer the next look compares with what was seen before.
        found = (await self._ask(self._look_at, named) if named else None) or ()
        seen.update(found)
        return [*news, *(name for name, _ in found)]

    def _look_at(
        self, named: Iterable[tuple[str, Mask]]
    ) -> Sequence[tuple[str, KubeletEpoch | None]]:
        """The files of which these events are news, as they are now."""
        return [(name, self._seen(name)) for name, mask in named if self._tells(name, mask)]

    def _tells(self, name: str, mask: Mask) -> bool:
        """Whether such an event is news of the file that it names."""
        del name, mask
        return True

    async def _differences(self, sight: "_Sight", seen: Look) -> list[str]:
        now = await self._ask(self._look, tuple(self._names()))
        sight.looked()
        if now is None:
            return []
        news = [name for name in sorted(now) if name and now[name] != seen.get(name)]
        if now[EVERYTHING] != seen.get(EVERYTHING):
            sight.is_over = True
        seen.update(now)
        return news

    def _is_itself(self, name: str) -> bool:
        return name == self._directory.name

    def _look(self, names: Collection[str]) -> Look:
        """These names as they are now, and under the empty name the directory itself."""
        found = {name: self._seen(name) for name in names}
        directory = self._seen(".")
        # The time of a directory changes with every name in it.
        found[EVERYTHING] = directory and KubeletEpoch(inode=directory.inode)
        return found

    def _seen(self, name: str) -> KubeletEpoch | None:
        path = self._directory / name
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise KubeletError(
                f"{path} cannot be looked at: {error.strerror}; let the agent read the kubelet's "
                "device plugin directory."
            ) from error
        return KubeletEpoch(inode=found.st_ino, ctime_ns=found.st_ctime_ns)


class FileDirectory(DirectoryWatch):
    """Files that people write, in one directory: a file counts once its writer has closed it.

    What cannot be looked at counts as missing: reading it says what is wrong.
    """

    _mask = COMES_OR_GOES | Mask.CLOSE_WRITE

    def __init__(self, directory: Path, names: Collection[str], offload: Offload) -> None:
        super().__init__(directory, lambda: names)
        self._offload = offload
        self._is_silent = False

    @override
    async def _ask(self, work: Callable[[*Ts], R], *args: *Ts) -> R | None:
        try:
            async with asyncio.timeout(ANSWER):
                found = await self._offload.call(work, *args)
        except TimeoutError:
            if not self._is_silent:
                log.warning("watch.silent", directory=str(self._directory), after=ANSWER)
            self._is_silent = True
            return None
        self._is_silent = False
        return found

    @override
    def _tells(self, name: str, mask: Mask) -> bool:
        """A new file is empty until it is closed; a new link is what it points to at once."""
        return Mask.CREATE not in mask or (self._directory / name).is_symlink()

    @override
    def _seen(self, name: str) -> KubeletEpoch | None:
        with contextlib.suppress(KubeletError):
            return super()._seen(name)
        return None


class HostFileWatch:
    """The FileWatch port: their directories, each with all links in it that may be swapped.

    They are looked at by `offload`.
    """

    def __init__(self, offload: Offload) -> None:
        self._offload = offload

    async def follow(self, paths: Collection[Path], changed: Callable[[], None]) -> NoReturn:
        """See agent.core.ports.FileWatch."""
        names: dict[Path, set[str]] = defaultdict(lambda: {SWAPPED})
        for path in paths:
            names[path.absolute().parent].add(path.name)
        async with asyncio.TaskGroup() as group:
            for directory, those in names.items():
                group.create_task(_follow(FileDirectory(directory, those, self._offload), changed))
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


async def _follow(directory: FileDirectory, changed: Callable[[], None]) -> None:
    async with contextlib.aclosing(directory.changes()) as changes:
        async for _ in changes:
            changed()


class _Sight:
    """One spell of watching: over when the directory is not the one that is watched any more."""

    def __init__(
        self, inotify: Inotify | None = None, parent: Watch | None = None, obstacle: str = ""
    ) -> None:
        self.inotify = inotify
        self.parent = parent
        self.obstacle = obstacle
        self.is_over = False
        self._ready = asyncio.Event()
        self._due = asyncio.get_running_loop().time() + POLL

    def wake(self) -> None:
        """Events can be read."""
        self._ready.set()

    def looked(self) -> None:
        """The files themselves were looked at; without events, by another spell the next time."""
        self._due = asyncio.get_running_loop().time() + POLL
        self.is_over = self.is_over or self.inotify is None

    async def events(self) -> list[Event]:
        """The next events, at least one; none when it is time for a look, however many came."""
        if asyncio.get_running_loop().time() >= self._due:
            return []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._due):
                while True:
                    await self._ready.wait()
                    self._ready.clear()
                    # Not Inotify.get(): what it has read when its caller is cancelled is lost.
                    found = list(iter(self.inotify.sync_get, None)) if self.inotify else []
                    if found:  # the loop may have told twice of the same ones
                        return found
        return []


@dataclasses.dataclass(frozen=True, slots=True)
class _Opened:
    """Events of a directory's parent, and of itself where it is there."""

    inotify: Inotify
    parent: Watch


class _Opening:
    """Opens on another thread, perhaps when nobody waits any more; what came of it is closed."""

    def __init__(self, directory: Path, mask: Mask) -> None:
        self._directory = directory
        self._mask = mask
        self._lock = threading.Lock()
        self._opened: _Opened | None = None
        self._over = False

    def open(self) -> "_Opened | str":
        """See `_open`."""
        opened = _open(self._directory, self._mask)
        if isinstance(opened, _Opened):
            with self._lock:
                self._opened = opened
                late = self._over
            if late:
                self.close()
        return opened

    def close(self) -> None:
        """Close what is open, now or as soon as it is."""
        with self._lock:
            self._over = True
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.inotify.close()


def _open(directory: Path, mask: Mask) -> "_Opened | str":
    """Begin to watch, or say why that cannot be."""
    with contextlib.ExitStack() as stack:
        try:
            inotify = stack.enter_context(Inotify(sync_timeout=0))
            parent = inotify.add_watch(directory.parent, COMES_OR_GOES | Mask.ONLYDIR)
        except OSError as error:
            return error.strerror or str(error)
        with contextlib.suppress(OSError):  # it is missing: the parent tells when it comes
            inotify.add_watch(directory, mask | ENDS | Mask.ONLYDIR)
        stack.pop_all()
        return _Opened(inotify, parent)
