"""The session with the driver's library, and the handles of its GPUs."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec
import structlog

from agent.errors import DriverError, GpuError
from agent.gpu import library as nvml
from agent.gpu.library import Handle, NvmlLibrary
from agent.gpu.threads import GpuThreads
from agent.health.attribution import doubtful
from agent.model import Gpu, GpuFault, GpuUuid

# Remembers which GPU has which index, until an answer of the driver contradicts it.


class Indexes:
    """Names the GPU at an index that does not answer with its UUID.

    It outlives sessions: a GPU that is slow at the start of one is the same as before. After the
    indexes changed, an index names a GPU only once that GPU answered there. Until then an unseen
    GPU may be at any index that does not answer, and a fault there is assigned to none for certain.
    """

    def __init__(self) -> None:
        self._uuids: dict[int, GpuUuid] = {}
        self._count: int | None = None
        self._unseen: set[GpuUuid] = set()
        """Known before the indexes changed, and not seen since."""

    def name(self, index: int) -> str:
        """The UUID at `index` if it is known, else `index N`."""
        return self._uuids.get(index, f"index {index}")

    def find(self, name: str) -> int | None:
        """The index with that name, or None."""
        return next((n for n in range(self._count or 0) if self.name(n) == name), None)

    def counted(self, count: int) -> bool:
        """Note how many GPUs the driver lists. False when the number, so any index, changed."""
        fits = self._count in {None, count}
        self._count = count
        if not fits:
            self._forget()
        return fits

    def seen(self, uuids: Mapping[int, GpuUuid]) -> bool:
        """Note the UUIDs that GPUs answered with. False when one was known at another index."""
        together = {**self._uuids, **uuids}
        fits = all(self._uuids.get(index, uuid) == uuid for index, uuid in uuids.items())
        fits = fits and len(set(together.values())) == len(together)
        if not fits:
            self._forget()
        self._uuids.update(uuids)
        self._unseen.difference_update(self._uuids.values())
        return fits

    def named(self, faults: Mapping[int, GpuFault]) -> tuple[GpuFault, ...]:
        """Name the faults, and add one for each GPU that may be at an index without a name.

        An added fault never says that the GPU is lost: at most one of them is.
        """
        named = {n: msgspec.structs.replace(faults[n], gpu=self.name(n)) for n in sorted(faults)}
        nameless = {n: fault for n, fault in named.items() if n not in self._uuids}
        if not nameless:
            self._unseen.clear()
            return tuple(named.values())
        text = "; ".join(f"it may be {fault.gpu}: {fault.text}" for fault in nameless.values())
        explained = len(nameless) <= len(self._unseen)
        return (
            *(f for n, f in named.items() if f.lost or n in self._uuids or not explained),
            *(GpuFault(uuid, text, doubtful(nameless.values())) for uuid in sorted(self._unseen)),
        )

    def _forget(self) -> None:
        self._unseen.update(self._uuids.values())
        self._uuids.clear()


# The session with the library: it begins when it is needed, and again after it broke.

T = TypeVar("T")

OPEN_DEADLINE: Final = 10.0
"""Seconds: without a persistence daemon, the first call wakes the GPUs, which takes seconds."""

_Versions = tuple[str, str | None]

NO_ANSWER: Final = "no answer in time"

DRIVER: Final = "the driver"
"""The name in place of a GPU's for calls about the whole driver."""

log = structlog.get_logger(__name__)


class OpenedSession(msgspec.Struct, frozen=True):
    """A session that has begun. `number` distinguishes it from earlier ones."""

    number: int
    driver_version: str
    library_version: str | None


class NvmlSession:
    """Opens the sessions of the process, one after the other. Call all methods on the loop.

    `find` returns the library file to use. `ended` is called when the driver ends a session.
    `quiet` ends all waits for events and returns whether all have left the library. `back` is
    called with a GPU whose stuck call returned. A late answer of an earlier session does not end
    the present one, and no call of an earlier session begins.
    """

    def __init__(
        self,
        library: nvml.NvmlLibrary,
        find: Callable[[], Path | None],
        sys_root: Path,
        deadline: float,
        ended: Callable[[DriverError], None],
        quiet: Callable[[], Awaitable[bool]],
        back: Callable[[str], None],
    ) -> None:
        self.threads = GpuThreads(deadline, back)
        self._library = library
        self._find = find
        self._sys_root = sys_root
        self._deadline = deadline
        self._ended = ended
        self._quiet = quiet
        self._preparing = asyncio.Lock()
        self._opening: asyncio.Future[_Versions] | None = None
        self._present: OpenedSession | None = None
        self._number = 0
        self._begun = 0
        self._broken = ""
        self._left_open = ""
        """Why the last session could not be ended, as logged; empty: it was ended."""
        self._closed = False
        self.withheld = ""
        """Why no session may begin; empty: one may."""

    async def open(self) -> OpenedSession:
        """Return the present session, or begin one. Raises DriverMissing, DriverError.

        All callers share one beginning. It goes on when they are cancelled or time out, so a slow
        driver is open for a later caller.
        """
        with self._translated(None):
            async with self._preparing:
                if self.withheld:
                    raise DriverError(self.withheld)
                if self._present is not None:
                    return self._present
                opening = self._opening or await self._begin_anew()
            done, _ = await asyncio.wait([opening], timeout=OPEN_DEADLINE)
            if not done:
                raise TimeoutError
            opening.result()
            return self._now()

    def check(self, opened: OpenedSession) -> None:
        """Raise DriverError if that session is over."""
        if self._present != opened:
            raise self._over()

    def end(self, error: DriverError, opened: OpenedSession | None = None) -> None:
        """Note that the session is over, and report it; the next call begins a new one."""
        if self._present is None or (opened is not None and self._present != opened):
            return
        log.warning("driver.session_ended", err=str(error))
        self._present = None
        self._broken = str(error)
        self._ended(error)

    @property
    def present(self) -> OpenedSession | None:
        """The present session, or None; this begins none."""
        return self._present

    async def call(
        self,
        opened: OpenedSession,
        gpu: str,
        work: Callable[[], T],
        late: Callable[[T], None] | None = None,
    ) -> T:
        """Make a call about one GPU, as GpuThreads.call. Raises DriverError if it is over."""
        self.check(opened)
        return await self.threads.call(gpu, work, late)

    async def whole(self, opened: OpenedSession, work: Callable[[], T]) -> T:
        """Make a call about the whole driver. Raises DriverError, DriverMissing."""
        with self._translated(opened):
            return await self.call(opened, DRIVER, work)

    def keep(self, gpus: Collection[str]) -> None:
        """Forget all other GPUs about which no call runs."""
        self.threads.keep({DRIVER, *gpus})

    async def shut(self, why: str) -> None:
        """End the session now, which closes all GPUs; a later call begins another.

        Raises DriverError when a call does not return from the library.
        """
        async with self._preparing:
            if self._opening is not None:
                await asyncio.wait([self._opening], timeout=OPEN_DEADLINE)
            self.end(DriverError(why))
            if not await self._alone():
                raise DriverError("a call has not returned from the driver, which holds all GPUs")
            ending = self.threads.launch(DRIVER, self._end_all)
            done, _ = await asyncio.wait([ending], timeout=self._deadline)
            if not done or ending.exception() is not None:
                raise DriverError("the driver does not end the session, which holds all GPUs")

    async def close(self) -> None:
        """End the session and all threads; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._present, self._broken = None, ""
        if await self._alone() and self._begun:
            ending = self.threads.launch(DRIVER, self._end_all)
            ending.add_done_callback(self._tell_left_open)
            await asyncio.wait([ending], timeout=self._deadline)
        self.threads.close()

    def _now(self) -> OpenedSession:
        """The present session. Raises DriverError when it has just ended."""
        if self._present is None:
            raise self._over()
        return self._present

    def _over(self) -> DriverError:
        return DriverError(self._broken or "the driver session was closed")

    @contextlib.contextmanager
    def _translated(self, opened: OpenedSession | None) -> Iterator[None]:
        """Translate errors of the whole driver; such an error may end the session `opened`."""
        try:
            yield
        except TimeoutError as error:
            raise DriverError(f"the driver does not answer: {str(error) or NO_ANSWER}") from error
        except ValueError as error:
            raise DriverError(f"the driver's answer cannot be decoded: {error}") from error
        except self._library.NVMLError as error:
            driver_error = nvml.driver_wide(error, about_gpu=False)
            if driver_error is not None and opened is not None:
                self.end(driver_error, opened)
            raise driver_error or DriverError(
                f"the driver answers with an error: {error}"
            ) from error

    async def _alone(self) -> bool:
        """Wait until no call and no event thread is in the library; False: some do not leave."""
        left = await self.threads.empty()
        return await self._quiet() and left

    async def _begin_anew(self) -> "asyncio.Future[_Versions]":
        """Begin a session after the last call has left: ending one during a call is undefined.

        The same thread ends the old session and then begins the new one. Raises DriverError, and
        TimeoutError while a call about the whole driver is stuck.
        """
        alone = await self._alone()
        if self._closed:
            raise self._over()
        if alone and self._begun:
            self.threads.launch(DRIVER, self._end_all).add_done_callback(self._tell_left_open)
        self._opening = self.threads.launch(DRIVER, partial(self._begin, alone=alone))
        self._opening.add_done_callback(self._begun_anew)
        return self._opening

    def _begun_anew(self, opening: "asyncio.Future[_Versions]") -> None:
        """Keep the new session, even if no caller waits for it."""
        self._opening = None
        if opening.exception() is None and not self._closed:
            self._number += 1
            self._present = OpenedSession(self._number, *opening.result())

    def _begin(self, *, alone: bool) -> _Versions:
        """Load the library, begin a session and read both versions. Runs on a thread.

        Another library may replace the present one only while no call is inside (`alone`): a
        returning call would continue in the other one.
        """
        library = self._library
        nvml.bind(library, self._find(), anew=alone)
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            if (why := nvml.missing(library, error, self._sys_root)) is not None:
                raise why from error
            other = nvml.replaced() if nvml.code(error) == nvml.LIB_RM_VERSION_MISMATCH else None
            if other is None:
                raise
            nvml.bind(library, other, anew=alone)
            library.nvmlInit()
        self._begun += 1  # before the next calls, which may fail: each begun one must be ended
        version = nvml.maybe(library, library.nvmlSystemGetNVMLVersion)
        return (
            nvml.text_of(library.nvmlSystemGetDriverVersion()),
            None if version is None else nvml.text_of(version),
        )

    def _end_all(self) -> None:
        """End all begun sessions, which the library counts. Runs on a thread."""
        while self._begun:
            try:
                self._library.nvmlShutdown()
            except self._library.NVMLError as error:
                if nvml.code(error) != nvml.UNINITIALIZED:
                    raise
            self._begun -= 1

    def _tell_left_open(self, ending: "asyncio.Future[None]") -> None:
        """Log why the session could not be ended, once for each reason."""
        error = ending.exception()
        text = "" if error is None else str(error)
        if text and text != self._left_open:
            log.info("driver.session_left_open", err=text)
        self._left_open = text


# Gets the driver's handles of GPUs, except of released ones. Nothing else opens a GPU.
#
# The library opens a GPU with its first handle; for a handle by UUID it may open others too. A GPU
# stays open until all sessions end. Until then nobody can reset it, change its MIG mode or unload
# the driver.

RELEASED = "it is released: hami-agent recheck takes it back"
UNPLACED = "it is searched for when all GPUs are taken back"
RECHECK_ALL = f"{UNPLACED}: hami-agent recheck all"


class Handles:
    """Knows which GPUs may be opened. While one is released, only PCI addresses find the others.

    Indexes change when a GPU goes, and a GPU that was never seen may be the released one.
    """

    def __init__(self, library: NvmlLibrary) -> None:
        self._library = library
        # The threads of the GPUs read these: they are only replaced, never changed.
        self._known: Mapping[GpuUuid, Gpu] = MappingProxyType({})
        self._released: frozenset[GpuUuid] = frozenset()
        self._unplaced: frozenset[GpuUuid] = frozenset()
        self._others: frozenset[GpuUuid] = frozenset()

    @property
    def released(self) -> frozenset[GpuUuid]:
        """The GPUs that must not be opened."""
        return self._released

    @property
    def unplaced(self) -> frozenset[GpuUuid]:
        """The GPUs taken back while others stay released that were never described.

        Their address is unknown: only a scan of all GPUs finds them.
        """
        return self._unplaced

    @property
    def all_released(self) -> bool:
        """True when every known GPU is released: then no session may be open."""
        return bool(self._released) and self._known.keys() <= self._released

    @property
    def known(self) -> tuple[Gpu, ...]:
        """The GPUs as the last scan described them."""
        return tuple(self._known.values())

    def seen(self, gpus: Iterable[Gpu], faults: Iterable[GpuFault]) -> None:
        """Take the result of a scan of all GPUs; a faulty one keeps its last description.

        While a GPU is released, no scan is of all GPUs.
        """
        if not self._released:
            names = {fault.gpu for fault in faults}
            kept = {uuid: gpu for uuid, gpu in self._known.items() if uuid in names}
            self._known = MappingProxyType(kept | {gpu.uuid: gpu for gpu in gpus})

    def release(self, uuids: Collection[GpuUuid], *, everything: bool = False) -> None:
        """Let no thread open these GPUs from now on.

        With `everything`, no other GPU either, until any GPU is taken back.

        Raises GpuError for a GPU that was never seen, unless all seen ones are released with it:
        then no session can hold it.
        """
        if everything:
            self._others |= self._known.keys() - self._released - set(uuids)
            uuids = {*uuids, *self._others}
        are_all = bool(self._known) and self._known.keys() <= {*uuids, *self._released}
        for uuid in uuids:
            if uuid not in self._known and not are_all:
                text = "the driver has not described it; only `hami-agent release all` releases it"
                raise GpuError(uuid, text)
        self._released |= set(uuids)
        self._unplaced -= set(uuids)

    def take_back(self, uuid: GpuUuid) -> None:
        """Let this GPU, and those released by `everything`, be opened again."""
        if uuid in self._released and uuid not in self._known:
            self._unplaced |= {uuid}
        self._released -= {uuid, *self._others}
        self._others = frozenset()
        if not self._released:
            self._unplaced = frozenset()

    def open_to(self, count: int) -> list[int]:
        """The indexes that may be opened; the driver lists `count`."""
        if not self._released:
            return list(range(count))
        return [gpu.index for gpu in self.known if gpu.uuid not in self._released]

    # On the threads of the GPUs.

    def of_index(self, index: int) -> Handle:
        """Get the handle of GPU `index`. Raises NVMLError, GpuError when it is released."""
        if not self._released:
            return self._library.nvmlDeviceGetHandleByIndex(index)
        return self._of(next((gpu for gpu in self.known if gpu.index == index), None), str(index))

    def of_uuid(self, uuid: GpuUuid) -> Handle:
        """Get the handle of a GPU. Raises NVMLError, GpuError when it is released."""
        if not self._released:
            return self._library.nvmlDeviceGetHandleByUUID(uuid)
        return self._of(self._known.get(uuid), uuid)

    def _of(self, gpu: Gpu | None, name: str) -> Handle:
        if name in self._released or (gpu is not None and gpu.uuid in self._released):
            raise GpuError(name, RELEASED)
        if gpu is None:
            raise GpuError(name, RECHECK_ALL)
        return self._library.nvmlDeviceGetHandleByPciBusId(_full(gpu.pci))


def _full(bus: str) -> str:
    """Convert a bus id of sysfs to the library's form: eight digits of the domain."""
    domain, _, rest = bus.partition(":")
    return f"{domain:0>8}:{rest}".upper()
