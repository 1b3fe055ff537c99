"""Watches directories for files that are created, removed, replaced or written.

They are the kubelet's device plugin directory with its sockets, and the directories of settings
files. Settings may lie on a file system that hangs, so another thread inspects them. The kubelet's
directory is on the node's disk, and an Allocate needs its state at once: the loop inspects it.
"""

import asyncio
import contextlib
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
from agent.kit.ticks import until_tick

log = structlog.get_logger(__name__)

POLL = 5.0
"""Seconds between two inspections of the files: they find what inotify missed."""
ANSWER = 5.0
"""Seconds for one inspection of settings files; after this it is tried again later."""
COMES_OR_GOES = Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO
ENDS = Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT | Mask.IGNORED
EVERYTHING = ""
SWAPPED = "..data"
"""The link that the kubelet replaces when it renews a mounted ConfigMap."""
Look = dict[str, KubeletEpoch | None]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class DirectoryWatch:
    """The SocketWatch port over `directory`.

    It reports only `names`, which it reads at every event, so they may change. `kubelet` is the
    name of the kubelet's own socket.
    """

    _mask = COMES_OR_GOES
    _turn = 0
    """Of the inspections: see agent.kit.ticks."""

    def __init__(
        self, directory: Path, names: Callable[[], Collection[str]], kubelet: str = "kubelet.sock"
    ) -> None:
        self._directory = directory
        self._names = names
        self._kubelet = kubelet
        self._polled = ""

    def epoch(self) -> KubeletEpoch | None:
        """The kubelet's present socket, or None. Raises KubeletError."""
        return self._seen(self._kubelet)

    def exists(self, name: str) -> bool:
        """True when `name` exists. Raises KubeletError."""
        return self._seen(name) is not None

    async def changes(self) -> AsyncGenerator[str, None]:
        """Yield names that were created, removed or replaced. Never ends. Raises KubeletError.

        The empty name, which also comes first, means: any may have changed. The directory may be
        missing, created and replaced.
        """
        while True:
            async with self._watching() as sight:
                if sight.obstacle and sight.obstacle != self._polled:
                    log.info("watch.polling", directory=str(self._directory), err=sight.obstacle)
                self._polled = sight.obstacle
                seen = await self._ask(self._look, tuple(self._names())) or {}
                yield EVERYTHING
                while not sight.is_over:
                    for name in await self._news(await sight.events(), sight, seen):
                        yield name

    async def _ask(self, work: Callable[[*Ts], R], *args: *Ts) -> R | None:
        """Return the result of `work(*args)`, which inspects files. None: no answer in time."""
        return work(*args)

    @contextlib.asynccontextmanager
    async def _watching(self) -> AsyncIterator["_Sight"]:
        """Watch the directory, and its parent to see it come and go; without inotify, only poll."""
        loop = asyncio.get_running_loop()
        with contextlib.closing(_Opening(self._directory, self._mask)) as opening:
            opened = await self._ask(opening.open)
            if not isinstance(opened, tuple):
                opening.close()  # if it opens late, nothing uses it
                yield _Sight(self._turn, obstacle=opened or "no answer")
                return
            inotify, parent = opened
            sight = _Sight(self._turn, inotify, parent)
            loop.add_reader(inotify.fd, sight.wake)
            try:
                yield sight
            finally:
                loop.remove_reader(inotify.fd)

    async def _news(self, events: list[Event], sight: "_Sight", seen: Look) -> list[str]:
        """The names that changed, by the events or else by an inspection; updates `seen`."""
        if not events:
            now = await self._ask(self._look, tuple(self._names()))
            sight.looked()
            if now is None:
                return []
            sight.is_over = sight.is_over or now[EVERYTHING] != seen.get(EVERYTHING)
            changed = [name for name in sorted(now) if name and now[name] != seen.get(name)]
            seen.update(now)
            return changed
        news = []
        named = []
        for event in events:
            name = str(event.name)
            if Mask.Q_OVERFLOW in event.mask:
                log.warning("watch.overflow", directory=str(self._directory))
                news.append(EVERYTHING)
            elif event.mask & ENDS or (
                event.watch is sight.parent and name == self._directory.name
            ):
                sight.is_over = True
            elif (
                event.watch is not sight.parent
                and name in self._names()
                and event.mask & self._mask
            ):
                named.append((name, event.mask))
        # Without an answer the next inspection compares with the last one that had an answer.
        states = (await self._ask(self._look_at, named) if named else None) or ()
        seen.update(states)
        return [*news, *(name for name, _ in states)]

    def _look_at(
        self, named: Iterable[tuple[str, Mask]]
    ) -> Sequence[tuple[str, KubeletEpoch | None]]:
        """The present state of the files that these events changed."""
        return [(name, self._seen(name)) for name, mask in named if self._tells(name, mask)]

    def _tells(self, name: str, mask: Mask) -> bool:
        """Whether such an event changed the file that it names."""
        del name, mask
        return True

    def _look(self, names: Collection[str]) -> Look:
        """The present state of these names, and of the directory under the empty name."""
        states = {name: self._seen(name) for name in names}
        directory = self._seen(".")
        # The time of a directory changes with every name in it.
        states[EVERYTHING] = directory and KubeletEpoch(inode=directory.inode)
        return states

    def _seen(self, name: str) -> KubeletEpoch | None:
        path = self._directory / name
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise KubeletError(
                f"{path} cannot be looked at: {error.strerror}; let the agent read the kubelet's "
                "device plugin directory."
            ) from error
        return KubeletEpoch(inode=status.st_ino, ctime_ns=status.st_ctime_ns)


class FileDirectory(DirectoryWatch):
    """Watches files that people write: a file changed once its writer has closed it.

    A file that cannot be inspected counts as missing: reading it raises the reason.
    """

    _mask = COMES_OR_GOES | Mask.CLOSE_WRITE
    _turn = 1

    def __init__(self, directory: Path, names: Collection[str], offload: Offload) -> None:
        super().__init__(directory, lambda: names)
        self._offload = offload
        self._is_silent = False

    @override
    async def _ask(self, work: Callable[[*Ts], R], *args: *Ts) -> R | None:
        try:
            async with asyncio.timeout(ANSWER):
                result = await self._offload.call(work, *args)
        except TimeoutError:
            if not self._is_silent:
                log.warning("watch.silent", directory=str(self._directory), after=ANSWER)
            self._is_silent = True
            return None
        self._is_silent = False
        return result

    @override
    def _tells(self, name: str, mask: Mask) -> bool:
        """A new file changed only when it is closed; a new link at once."""
        return Mask.CREATE not in mask or (self._directory / name).is_symlink()

    @override
    def _seen(self, name: str) -> KubeletEpoch | None:
        with contextlib.suppress(KubeletError):
            return super()._seen(name)
        return None


class HostFileWatch:
    """The FileWatch port: watches the directories of files, and the ConfigMap link in each.

    `offload` runs the inspections.
    """

    def __init__(self, offload: Offload) -> None:
        self._offload = offload

    async def follow(self, paths: Collection[Path], changed: Callable[[], None]) -> NoReturn:
        """See agent.core.ports.FileWatch."""
        names: dict[Path, set[str]] = defaultdict(lambda: {SWAPPED})
        for path in paths:
            names[path.absolute().parent].add(path.name)

        async def follow_one(directory: FileDirectory) -> None:
            async with contextlib.aclosing(directory.changes()) as changes:
                async for _ in changes:
                    changed()

        async with asyncio.TaskGroup() as group:
            for directory, those in names.items():
                group.create_task(follow_one(FileDirectory(directory, those, self._offload)))
        await asyncio.Event().wait()
        raise AssertionError("unreachable: the event is never set")


class _Sight:
    """One period of watching; it ends when the watched directory is replaced or removed."""

    def __init__(
        self,
        turn: int,
        inotify: Inotify | None = None,
        parent: Watch | None = None,
        obstacle: str = "",
    ) -> None:
        self._turn = turn
        self.inotify = inotify
        self.parent = parent
        self.obstacle = obstacle
        self.is_over = False
        self._ready = asyncio.Event()
        self._due = asyncio.get_running_loop().time() + until_tick(POLL, self._turn)

    def wake(self) -> None:
        """Note that events can be read."""
        self._ready.set()

    def looked(self) -> None:
        """Note an inspection of the files; without inotify it ends the period."""
        self._due = asyncio.get_running_loop().time() + until_tick(POLL, self._turn)
        self.is_over = self.is_over or self.inotify is None

    async def events(self) -> list[Event]:
        """Wait for the next events; return none when an inspection is due."""
        if asyncio.get_running_loop().time() >= self._due:
            return []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._due):
                while True:
                    await self._ready.wait()
                    self._ready.clear()
                    # Not Inotify.get(): it loses events when its caller is cancelled.
                    events = list(iter(self.inotify.sync_get, None)) if self.inotify else []
                    if events:  # wake() may come twice for the same ones
                        return events
        return []


class _Opening:
    """Opens an inotify instance on another thread, and closes it even if it opens late."""

    def __init__(self, directory: Path, mask: Mask) -> None:
        self._directory = directory
        self._mask = mask
        self._lock = threading.Lock()
        self._inotify: Inotify | None = None
        self._over = False

    def open(self) -> tuple[Inotify, Watch] | str:
        """Begin to watch; return also the watch of the parent, or why watching is impossible."""
        with contextlib.ExitStack() as stack:
            try:
                inotify = stack.enter_context(Inotify(sync_timeout=0))
                parent = inotify.add_watch(self._directory.parent, COMES_OR_GOES | Mask.ONLYDIR)
            except OSError as error:
                return error.strerror or str(error)
            with contextlib.suppress(OSError):  # if it is missing, the parent reports its creation
                inotify.add_watch(self._directory, self._mask | ENDS | Mask.ONLYDIR)
            with self._lock:
                if not self._over:
                    self._inotify = inotify
                    stack.pop_all()
            return inotify, parent

    def close(self) -> None:
        """Close the instance, now or as soon as it is open."""
        with self._lock:
            self._over = True
            inotify, self._inotify = self._inotify, None
        if inotify is not None:
            inotify.close()
