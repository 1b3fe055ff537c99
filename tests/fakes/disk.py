"""A disk in memory that is honest about syncing: what was not synced may be lost or torn."""

import asyncio
import errno
import random
from collections.abc import Callable
from pathlib import Path

from agent.errors import StateError
from agent.host.system import DirectoryFiles, HostDisk, replace
from tests.fakes.chance import Seeded
from tests.fakes.offload import Inline


class Killed(BaseException):
    """The process is dead: nothing after this step happens, no clean-up either."""


class Content:
    """One file: what programs read (`data`) and what is on disk (`synced`, None: nothing yet)."""

    def __init__(self) -> None:
        self.data = b""
        self.synced: bytes | None = None


Names = dict[str, Content]
Change = dict[str, Content | None]
"""Names that came, and names that went (None), all at once."""


class MemoryFiles(DirectoryFiles):
    """The steps in memory. While it is `full` no file is made and none is written.

    `between` is called twice while a file is written: it is empty, then half of it is there.
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        self.names: Names = {}
        self._on_disk: Names = {}
        self._unsynced: list[Change] = []
        self._chance = chance or Seeded()
        self.full = False
        self.between: Callable[[], None] = lambda: None

    def write(self, name: str, data: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "ENOSPC", name)
        if name in self.names:
            raise FileExistsError(errno.EEXIST, "File exists", name)
        content = Content()
        self._rename({name: content})
        self.between()
        content.data = data[: len(data) // 2]
        self.between()
        content.data = content.synced = data

    def link(self, name: str, second: str) -> None:
        if second in self.names:
            raise FileExistsError(errno.EEXIST, "File exists", second)
        self._rename({second: self._found(name)})

    def rename(self, name: str, target: str) -> None:
        content = self._found(name)
        if self.names.get(target) is not content:  # POSIX: two names of one file both stay
            self._rename({target: content}, gone=name)

    def unlink(self, name: str) -> None:
        self._found(name)
        self._rename({}, gone=name)

    def sync(self) -> None:
        self._on_disk = dict(self.names)
        self._unsynced.clear()

    def crash(self) -> None:
        """Power loss: of what was not synced, any part may have reached the disk, or none."""
        for change in self._unsynced:
            if self._chance.random() < 0.5:
                self._apply(self._on_disk, change)
        for content in {id(c): c for c in self._on_disk.values()}.values():
            self._tear(content)
        self.names = dict(self._on_disk)
        self._unsynced.clear()

    def _tear(self, content: Content) -> None:
        if content.data == content.synced:
            return
        cut = self._chance.randrange(len(content.data) + 1)
        content.data = content.data[:cut] + b"\0" * self._chance.randrange(3)
        content.synced = content.data

    def _found(self, name: str) -> Content:
        if name not in self.names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return self.names[name]

    def _rename(self, change: Names, gone: str | None = None) -> None:
        whole: Change = {**change}
        if gone is not None:
            whole[gone] = None
        self._unsynced.append(whole)
        self._apply(self.names, whole)

    @staticmethod
    def _apply(names: Names, change: Change) -> None:
        for name, content in change.items():
            if content is None:
                names.pop(name, None)
            else:
                names[name] = content


class DiskFaults(DirectoryFiles):
    """Passes every step on to `files`, but for the ones that are made to fail or to be the last."""

    def __init__(self, files: DirectoryFiles) -> None:
        self.steps = 0
        self._files = files
        self._failures: dict[int, OSError] = {}
        self._last: int | None = None
        if isinstance(files, MemoryFiles):
            files.between = self._step

    def fail_at(self, step: int, code: int, times: int = 1) -> None:
        """The step that many steps from now (0: the next) fails, and so do those after it."""
        for n in range(times):
            self._failures[self.steps + step + n] = OSError(code, errno.errorcode[code])

    def kill_at(self, step: int) -> None:
        """The process dies before the step that many steps from now."""
        self._last = self.steps + step

    def revive(self) -> None:
        """A new process: nothing fails any more."""
        self._last = None
        self._failures.clear()

    def write(self, name: str, data: bytes) -> None:
        self._step()
        self._files.write(name, data)
        self._step()

    def link(self, name: str, second: str) -> None:
        self._step()
        self._files.link(name, second)

    def rename(self, name: str, target: str) -> None:
        self._step()
        self._files.rename(name, target)

    def unlink(self, name: str) -> None:
        self._step()
        self._files.unlink(name)

    def sync(self) -> None:
        self._step()
        self._files.sync()

    def _step(self) -> None:
        step, self.steps = self.steps, self.steps + 1
        if self._last is not None and step >= self._last:
            raise Killed
        if error := self._failures.get(step):
            raise error


class MemoryDisk:
    """The Disk port in memory, by the same steps as the real one."""

    place = "/state"

    def __init__(self, chance: random.Random | None = None) -> None:
        self.files = MemoryFiles(chance)
        self.faults = DiskFaults(self.files)

    async def read(self, name: str) -> bytes | None:
        """The content, or None when absent."""
        content = self.files.names.get(name)
        return None if content is None else content.data

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        """Durably replace, unless a fault is set. Raises StateError."""
        try:
            replace(self.faults, name, data, keep)
        except OSError as error:
            raise StateError(f"/state/{name} cannot be written: {error.strerror}.") from error

    async def check(self) -> None:
        """Files can be replaced, for all that is seen without a write."""

    def crash(self) -> None:
        """Power loss and a new start."""
        self.files.crash()
        self.faults.revive()


async def with_faults(path: Path) -> tuple[HostDisk, DiskFaults]:
    """A disk on a real directory, and what may go wrong there."""
    found: list[DiskFaults] = []

    def wrap(directory: int) -> DiskFaults:
        found.append(DiskFaults(DirectoryFiles(directory)))
        return found[0]

    disk = await HostDisk.open(path, Inline(), wrap)
    return disk, found[0]


class GatedDisk(MemoryDisk):
    """Counts writes; none goes on while `gate` is closed, as it is at first where it is `shut`."""

    def __init__(self, *, shut: bool = False) -> None:
        super().__init__()
        self.writes = 0
        self.gate = asyncio.Event()
        if not shut:
            self.gate.set()

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        self.writes += 1
        await self.gate.wait()
        await super().replace(name, data, keep=keep)

    async def content(self, name: str) -> bytes:
        """The content of a file that must be there."""
        found = await self.read(name)
        assert found is not None
        return found
