"""Scans for GPUs: at the start, when the driver reports a change, each minute, and on demand."""

import asyncio
from collections.abc import Callable

import structlog

from agent.core.errors import DriverError
from agent.core.health.whose import MANY, MAY_PASS, OF_ALL, Ill, same_fault
from agent.core.inventory.gpu import Scan
from agent.core.ports import Driver
from agent.kit.cell import Cell
from agent.kit.running_time import Lag
from agent.kit.ticks import until_tick

log = structlog.get_logger(__name__)


class Discovery:
    """Scans the driver and passes each scan to `found`.

    A scan is tried again after 1, 2, 4, … 30 s in three cases: the driver is missing or fails; it
    reports the same fault for all GPUs that are not `ill`, also in a new session; it fails for one
    GPU in a way that may pass. In the first two cases the last inventory stays. `problem`: what is
    wrong with the driver, in words; None: it answers.
    """

    def __init__(
        self,
        driver: Driver,
        found: Callable[[Scan], None],
        *,
        ill: Ill = lambda _: False,
        interval: float = 60.0,
        deadline: float = 10.0,
        retry: tuple[float, float] = (1.0, 30.0),
    ) -> None:
        self.problem: Cell[str | None] = Cell("the driver has not been asked yet")
        self._driver = driver
        self._found = found
        self._ill = ill
        self._interval = interval
        self._deadline = deadline
        self._retry = retry
        self._wanted = asyncio.Event()

    def rescan(self) -> None:
        """Scan as soon as possible. Calls during a scan cause one more scan."""
        self._wanted.set()

    async def run(self) -> None:
        """Scan for ever."""
        first, last = self._retry
        delay = first
        while True:
            self._wanted.clear()
            is_done = await self._scan()
            is_wanted = await self._rest(until_tick(self._interval) if is_done else delay)
            if is_done:
                delay = first
            elif not is_wanted:  # a rescan on demand gives the driver no time to recover
                delay = min(2 * delay, last)

    async def _scan(self) -> bool:
        """Scan once. False: try again soon."""
        try:
            async with Lag().within(self._deadline):
                scan = await self._driver.scan()
                if same_fault(scan, self._ill) is not None and await self._driver.renew():
                    scan = await self._driver.scan()
        except DriverError as error:
            self._fail(str(error))
            return False
        except TimeoutError:
            self._fail(f"the driver did not answer within {self._deadline:g} s")
            return False
        fault = same_fault(scan, self._ill)
        if fault is not None and len(scan.faults) >= MANY:
            self._fail(OF_ALL + fault.text)
            return False
        if self.problem.set(None):
            log.info("driver.answers", version=scan.driver_version, gpus=len(scan.gpus))
        self._found(scan)
        return not any(fault.trouble in MAY_PASS for fault in scan.faults)

    def _fail(self, text: str) -> None:
        if self.problem.set(text):
            log.warning("driver.fails", err=text)

    async def _rest(self, seconds: float) -> bool:
        """Wait for at most `seconds`. True: a scan on demand is wanted before."""
        try:
            async with asyncio.timeout(seconds):
                return await self._wanted.wait()
        except TimeoutError:
            return False
