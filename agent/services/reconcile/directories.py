"""Removes container directories of closed rows, and leaked ones.

A leaked directory belongs to no row and to no pod of this node.
"""

import asyncio
import math

import structlog

from agent.core.errors import AgentError
from agent.core.ports import Clock, HookDirs
from agent.core.reconcile.findings import ReconcileFacts
from agent.core.reconcile.pace import DEADLINE
from agent.core.reconcile.reconcile import leaked
from agent.core.state.ledger import Ledger
from agent.kit.cell import Cell

log = structlog.get_logger(__name__)

SWEEP_PERIOD = 3600.0
"""Seconds between searches for leaked directories. The first search is at the start."""


class Directories:
    """Removes container directories. A failure is logged, never raised."""

    def __init__(self, hooks: HookDirs, ledger: Cell[Ledger], clock: Clock) -> None:
        self._hooks = hooks
        self._ledger = ledger
        self._clock = clock
        self._swept_at = -math.inf

    async def names(self) -> frozenset[str] | None:
        """The names of all container directories; None: the disk failed or did not answer."""
        try:
            async with asyncio.timeout(DEADLINE):
                return frozenset(await self._hooks.found())
        except (AgentError, TimeoutError) as error:
            log.warning("hooks.not_searched", err=str(error) or "out of time")
            return None

    async def sweep(self, seen: ReconcileFacts) -> None:
        """Remove leaked directories if the last successful search is SWEEP_PERIOD ago."""
        elapsed = asyncio.get_running_loop().time()
        if elapsed - self._swept_at < SWEEP_PERIOD:
            return
        try:
            async with asyncio.timeout(DEADLINE):
                found = await self._hooks.found()
        except (AgentError, TimeoutError) as error:
            log.warning("hooks.not_searched", err=str(error) or "out of time")
            return
        self._swept_at = elapsed
        now = self._clock.now()
        ages = {name: now - changed for name, changed in found.items()}
        for name in leaked(ages, self._ledger.value, seen):
            log.info("hooks.leaked", directory=name)
            try:
                await self.remove(name)
            except TimeoutError:
                return

    async def remove(self, name: str) -> bool:
        """Remove the directory. False: this one cannot be removed.

        Raises TimeoutError: the disk does not answer, so it is useless to try another directory.
        """
        try:
            async with asyncio.timeout(DEADLINE):
                await self._hooks.remove(name)
        except AgentError as error:
            log.warning("hooks.not_removed", directory=name, err=str(error))
            return False
        except TimeoutError:
            log.warning("hooks.not_removed", directory=name, err="out of time")
            raise
        return True
