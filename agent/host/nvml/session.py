"""The session with the library: it begins when it is needed, and again after it broke."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import structlog

from agent.core.errors import DriverError
from agent.host.nvml import library as nvml
from agent.host.nvml.threads import GpuThreads

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
