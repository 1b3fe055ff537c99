"""The session with the library: begun when it is needed, begun anew when it has broken."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import structlog

from agent.core.errors import DriverError
from agent.host.nvml import library as nvml
from agent.host.nvml.threads import GpuThreads

T = TypeVar("T")

OPEN_DEADLINE: Final = 10.0
"""The first call wakes GPUs that no persistence daemon keeps awake, which takes seconds."""

_Versions = tuple[str, str | None]

NO_ANSWER: Final = "no answer in time"

DRIVER: Final = "the driver"
"""Whom calls are about that are about no GPU."""

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedSession:
    """A session that has begun. `number` tells it from those before."""

    number: int
    driver_version: str
    library_version: str | None


class NvmlSession:
    """One after the other, for the life of the process. All methods are called on the loop.

    `ended` is called when the driver ends one; `quiet` sends home who waits in the library, and
    says whether all have left it; `back` is told of a GPU that was stuck and is so no more. What
    a late answer says of a session that is over already does not end the next, and no call of one
    that is over begins.
    """

    def __init__(
        self,
        library: nvml.NvmlLibrary,
        find: Callable[[], Path | None],
        deadline: float,
        ended: Callable[[DriverError], None],
        quiet: Callable[[], Awaitable[bool]],
        back: Callable[[str], None],
    ) -> None:
        self.threads = GpuThreads(deadline, back)
        self._library = library
        self._find = find
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
        """Why the last one could not be ended, as it was told. Empty: it could."""
        self._closed = False
        self.withheld = ""
        """Why no session may be begun; empty: one may."""

    async def open(self) -> OpenedSession:
        """The present session; begins one if there is none. Raises DriverMissing, DriverError.

        All callers share one beginning, which goes on when they leave: a driver that takes longer
        than each of them has patience is open for whoever comes next.
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
        """Raise DriverError when that session is over."""
        if self._present != opened:
            raise self._over()

    def end(self, error: DriverError, opened: OpenedSession | None = None) -> None:
        """The driver has ended the session: the next call begins anew; whoever listens is told."""
        if self._present is None or (opened is not None and self._present != opened):
            return
        log.warning("driver.session_ended", err=str(error))
        self._present = None
        self._broken = str(error)
        self._ended(error)

    @property
    def present(self) -> OpenedSession | None:
        """The present session, if there is one; it is not begun for this."""
        return self._present

    async def call(
        self,
        opened: OpenedSession,
        gpu: str,
        work: Callable[[], T],
        late: Callable[[T], None] | None = None,
    ) -> T:
        """A call about one GPU, as of GpuThreads. Raises DriverError when that session is over.

        What has not begun when the session ends would meet another one, or none.
        """
        self.check(opened)
        return await self.threads.call(gpu, work, late)

    async def whole(self, opened: OpenedSession, work: Callable[[], T]) -> T:
        """A call of that session about the driver as a whole. Raises DriverError, DriverMissing."""
        with self._translated(opened):
            return await self.call(opened, DRIVER, work)

    def keep(self, gpus: Collection[str]) -> None:
        """These are the GPUs: a thread for any other has nothing more to do."""
        self.threads.keep({DRIVER, *gpus})

    async def shut(self, why: str) -> None:
        """End it now, and let go of all GPUs; who asks later begins another.

        Raises DriverError when somebody in the library does not come back.
        """
        async with self._preparing:
            if self._opening is not None:
                await asyncio.wait([self._opening], timeout=OPEN_DEADLINE)
            self.end(DriverError(why))
            if not await self._alone():
                raise DriverError("a call has not come back from the driver, which holds all GPUs")
            ending = self.threads.launch(DRIVER, self._end_all)
            done, _ = await asyncio.wait([ending], timeout=self._deadline)
            if not done or ending.exception() is not None:
                raise DriverError("the driver does not end the session, which holds all GPUs")

    async def close(self) -> None:
        """End it for good; a second call does nothing."""
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
        """The present session. Raises DriverError when it has ended in this very moment."""
        if self._present is None:
            raise self._over()
        return self._present

    def _over(self) -> DriverError:
        return DriverError(self._broken or "the driver session was closed")

    @contextlib.contextmanager
    def _translated(self, opened: OpenedSession | None) -> Iterator[None]:
        """What the driver as a whole answers, in our own tree; it may end the session `opened`."""
        try:
            yield
        except TimeoutError as error:
            raise DriverError(f"the driver does not answer: {str(error) or NO_ANSWER}") from error
        except ValueError as error:
            raise DriverError(f"the driver answers with what is no text: {error}") from error
        except self._library.NVMLError as error:
            whole = nvml.driver_wide(error, about_gpu=False)
            if whole is not None and opened is not None:
                self.end(whole, opened)
            raise whole or DriverError(f"the driver answers with an error: {error}") from error

    async def _alone(self) -> bool:
        """Once no call and no wait for events is inside the library; False: some do not leave."""
        left = await self.threads.empty()
        return await self._quiet() and left

    async def _begin_anew(self) -> "asyncio.Future[_Versions]":
        """Begin after the last call has left: to end a session around one is undefined.

        The thread keeps the order: one line for both. Raises TimeoutError while a call about the
        driver as a whole is stuck, DriverError.
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
        """Keep what the beginning gave, whether or not somebody waits for it."""
        self._opening = None
        if opening.exception() is None and not self._closed:
            self._number += 1
            self._present = OpenedSession(self._number, *opening.result())

    def _begin(self, *, alone: bool) -> _Versions:
        """On a thread: load the library, begin, and ask for both versions.

        Another library in place of the present one only when nobody is inside: a call that comes
        back would go on in the other one.
        """
        library = self._library
        nvml.bind(library, self._find(), anew=alone)
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            other = nvml.replaced() if nvml.code(error) == nvml.LIB_RM_VERSION_MISMATCH else None
            if other is None:
                raise
            nvml.bind(library, other, anew=alone)
            library.nvmlInit()
        self._begun += 1  # here, for whatever fails next: each one must be ended
        version = nvml.maybe(library, library.nvmlSystemGetNVMLVersion)
        return (
            nvml.text_of(library.nvmlSystemGetDriverVersion()),
            None if version is None else nvml.text_of(version),
        )

    def _end_all(self) -> None:
        """On a thread: end what has begun; the library counts them."""
        while self._begun:
            try:
                self._library.nvmlShutdown()
            except self._library.NVMLError as error:
                if nvml.code(error) != nvml.UNINITIALIZED:
                    raise
            self._begun -= 1

    def _tell_left_open(self, ending: "asyncio.Future[None]") -> None:
        """Once for each reason: a driver that fails is asked again for as long as it does."""
        error = ending.exception()
        text = "" if error is None else str(error)
        if text and text != self._left_open:
            log.info("driver.session_left_open", err=text)
        self._left_open = text
