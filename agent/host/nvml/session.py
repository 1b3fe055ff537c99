"""The session with the library: begun when it is needed, begun anew when it has broken."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import structlog

from agent.core.errors import DriverError
from agent.host.nvml import library as nvml
from agent.host.nvml.threads import CallPool

T = TypeVar("T")

OPEN_DEADLINE: Final = 10.0
"""The first call wakes GPUs that no persistence daemon keeps awake, which takes seconds."""

DRIVER: Final = "the driver"
"""The key of calls that are about no GPU."""

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """A session that has begun. `number` tells it from those before."""

    number: int
    driver_version: str
    library_version: str | None


class Session:
    """One after the other, for the life of the process. All methods are called on the loop.

    `ended` is called when the driver ends one; `quiet` sends home who waits in the library, and
    says whether all have left it. What a late answer says of a session that is over already does
    not end the next.
    """

    def __init__(
        self,
        library: nvml.NvmlLibrary,
        find: Callable[[], Path | None],
        deadline: float,
        ended: Callable[[DriverError], None],
        quiet: Callable[[], Awaitable[bool]],
    ) -> None:
        self.pool = CallPool("nvml", deadline)
        self._library = library
        self._find = find
        self._ended = ended
        self._quiet = quiet
        self._opening = asyncio.Lock()
        self._present: Opened | None = None
        self._number = 0
        self._begun = 0
        self._broken = ""
        self._closed = False

    async def open(self) -> Opened:
        """The present session; begins one if there is none. Raises DriverMissing, DriverError."""
        async with self._opening:
            if self._closed:
                raise DriverError("the driver session was closed")
            if self._present is None:
                await self._shut_down()
                driver_version, library_version = await self.whole(self._begin, OPEN_DEADLINE)
                self._number += 1
                self._present = Opened(self._number, driver_version, library_version)
            return self._present

    def check(self, opened: Opened) -> None:
        """Raise DriverError when that session is over."""
        if self._present != opened:
            raise DriverError(self._broken or "the driver session was closed")

    def end(self, error: DriverError, opened: Opened | None = None) -> None:
        """The driver has ended the session: the next call begins anew; whoever listens is told."""
        if self._present is None or (opened is not None and self._present != opened):
            return
        log.warning("driver.session_ended", err=str(error))
        self._present = None
        self._broken = str(error)
        self._ended(error)

    async def whole(
        self,
        work: Callable[[], T],
        deadline: float | None = None,
        late: Callable[[T], None] | None = None,
    ) -> T:
        """A call about the driver as a whole; as of CallPool. Raises DriverError, DriverMissing."""
        opened = self._present
        try:
            return await self.pool.call(DRIVER, work, deadline, late)
        except TimeoutError as error:
            raise DriverError(
                f"the driver does not answer: {str(error) or 'no answer in time'}"
            ) from error
        except ValueError as error:
            raise DriverError(f"the driver answers with what is no text: {error}") from error
        except self._library.NVMLError as error:
            whole = nvml.driver_wide(error, about_gpu=False)
            if whole is not None and opened is not None:
                self.end(whole, opened)
            raise whole or DriverError(f"the driver answers with an error: {error}") from error

    async def close(self) -> None:
        """End it for good; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        await self._shut_down()
        self._present = None
        await self.pool.close()

    def _begin(self) -> tuple[str, str | None]:
        """On a thread: load the library, begin, and ask for both versions."""
        library = self._library
        nvml.bind(library, self._find())
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            other = nvml.replaced() if nvml.code(error) == nvml.LIB_RM_VERSION_MISMATCH else None
            if other is None:
                raise
            nvml.bind(library, other)
            library.nvmlInit()
        self._begun += 1  # here, for whatever fails or comes late: each one must be ended
        version = nvml.maybe(library, library.nvmlSystemGetNVMLVersion)
        return (
            nvml.text_of(library.nvmlSystemGetDriverVersion()),
            None if version is None else nvml.text_of(version),
        )

    async def _shut_down(self) -> None:
        """End what has begun, unless a thread is still inside the library: that is undefined."""
        quiet = await self._quiet()
        try:
            while self._begun and quiet and not self.pool.stuck:
                await self.pool.call(DRIVER, self._end_one)
        except (TimeoutError, self._library.NVMLError) as error:
            log.info("driver.session_left_open", err=str(error) or "no answer in time")

    def _end_one(self) -> None:
        """On a thread: end one; the library counts them."""
        try:
            self._library.nvmlShutdown()
        except self._library.NVMLError as error:
            if nvml.code(error) != nvml.UNINITIALIZED:
                raise
        self._begun -= 1
