"""The kubelet's device plugin directory: which sockets appear, go, or are made anew."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Iterator
from pathlib import Path

import structlog
from asyncinotify import Event, Inotify, Mask, Watch

from agent.core.errors import KubeletError
from agent.core.holdings import KubeletEpoch

log = structlog.get_logger(__name__)

POLL = 5.0
"""Seconds between two looks at the files themselves: what inotify missed is seen then."""
COMES_OR_GOES = Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO
ENDS = Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT | Mask.IGNORED
EVERYTHING = ""
Look = dict[str, KubeletEpoch | None]


class DirectoryWatch:
    """The SocketWatch port on `directory`.

    Only `names` are reported, exactly as written; the collection is looked at for every event, so
    that it may grow. `kubelet` is the name of the kubelet's own socket.
    """

    def __init__(
        self, directory: Path, names: Collection[str], kubelet: str = "kubelet.sock"
    ) -> None:
        self._directory = directory
        self._names = names
        self._kubelet = kubelet

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
            with _watching(self._directory) as sight:
                seen = self._look()
                yield EVERYTHING
                while not sight.is_over:
                    for name in self._news(await sight.events(), sight, seen):
                        yield name

    def _news(self, events: list[Event], sight: "_Sight", seen: Look) -> list[str]:
        """What the events say, or where there are none, a look at the files; `seen` follows."""
        if not events:
            return self._differences(sight, seen)
        news = []
        for event in events:
            name = str(event.name)
            if Mask.Q_OVERFLOW in event.mask:
                log.warning("watch.overflow", directory=str(self._directory))
                news.append(EVERYTHING)
            elif event.mask & ENDS or (event.watch is sight.parent and self._is_itself(name)):
                sight.is_over = True
            elif event.watch is not sight.parent and name in self._names:
                seen[name] = self._seen(name)
                news.append(name)
        return news

    def _differences(self, sight: "_Sight", seen: Look) -> list[str]:
        now = self._look()
        news = [name for name in sorted(now) if name and now[name] != seen.get(name)]
        sight.is_over = sight.inotify is None or now[EVERYTHING] != seen[EVERYTHING]
        seen.update(now)
        return news

    def _is_itself(self, name: str) -> bool:
        return name == self._directory.name

    def _look(self) -> Look:
        """All names as they are now, and under the empty name the directory itself."""
        found = {name: self._seen(name) for name in self._names}
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


class _Sight:
    """One spell of watching: over when the directory is not the one that is watched any more."""

    def __init__(self, inotify: Inotify | None = None, parent: Watch | None = None) -> None:
        self.inotify = inotify
        self.parent = parent
        self.is_over = False
        self._ready = asyncio.Event()

    def wake(self) -> None:
        """Events can be read."""
        self._ready.set()

    async def events(self) -> list[Event]:
        """The next events, at least one; none when nothing came for a while."""
        try:
            async with asyncio.timeout(POLL):
                await self._ready.wait()
        except TimeoutError:
            return []
        self._ready.clear()
        # Not Inotify.get(): what it has read when its caller is cancelled is lost.
        return list(iter(self.inotify.sync_get, None)) if self.inotify else []


@contextlib.contextmanager
def _watching(directory: Path) -> Iterator[_Sight]:
    """Watch a directory and, to see itself come and go, its parent; or only look now and then."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        try:
            inotify = stack.enter_context(Inotify(sync_timeout=0))
            parent = inotify.add_watch(directory.parent, COMES_OR_GOES | Mask.ONLYDIR)
        except OSError as error:
            log.info("watch.polling", directory=str(directory), err=error.strerror)
            yield _Sight()
            return
        with contextlib.suppress(OSError):  # it is missing: the parent tells when it comes
            inotify.add_watch(directory, COMES_OR_GOES | ENDS | Mask.ONLYDIR)
        sight = _Sight(inotify, parent)
        loop.add_reader(inotify.fd, sight.wake)
        stack.callback(loop.remove_reader, inotify.fd)
        yield sight
