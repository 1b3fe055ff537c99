"""The settings of this node, resolved anew when what they depend on becomes known or changes.

Profiles ask for labels and models of GPUs, which nobody knows when the process starts.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Final

import structlog

from agent.app.facts import Facts
from agent.core.changes import NodeEvent
from agent.core.errors import SettingsError
from agent.core.gpu import GpuUuid, Scan
from agent.settings.profiles import NodeFacts
from agent.settings.reading import Reading
from agent.settings.schema import Settings

LIVE: Final = frozenset({"sharing", "report", "edits"})
"""The sections that take effect while the agent runs."""

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Effects:
    """What a change of settings brings about: `refresh` the inventory, `say` an Event, `stop`."""

    refresh: Callable[[], None]
    say: Callable[[NodeEvent], None]
    stop: asyncio.Event


class Fitting:
    """Sole writer of the cells of settings.

    `refusal`: the settings cannot serve the GPUs that the first scan showed; `stop` is set then.
    `labelled` is set once the Node's labels are known and the inventory follows from them: what is
    told to the scheduler waits for it.
    """

    def __init__(
        self,
        settings: Settings,
        reading: Reading,
        cells: Facts,
        effects: Effects,
    ) -> None:
        self.refusal: SettingsError | None = None
        self.labelled = asyncio.Event()
        self._running = settings
        self._reading = reading
        self._cells = cells
        self._effects = effects
        self._facts = NodeFacts(settings.node)
        self._refused: NodeFacts | None = None
        self._models: dict[GpuUuid, str] = {}

    async def run(self) -> None:
        """Follow the labels of this Node for ever; while it is not seen, the last ones hold."""
        async for node in self._cells.node.follow():
            if node is not None:
                self._learn(dataclasses.replace(self._facts, labels=node.labels))
                self.labelled.set()

    def saw_gpus(self, scan: Scan) -> bool:
        """The driver was asked: take in its GPUs' models. False when they must not be listed."""
        first = self._facts.gpu_models is None
        silent = {fault.gpu for fault in scan.faults}
        known = {uuid: name for uuid, name in self._models.items() if uuid in silent}
        self._models = known | {gpu.uuid: gpu.name for gpu in scan.gpus}
        models = tuple(self._models.values())
        accepted = self._learn(dataclasses.replace(self._facts, gpu_models=models))
        if first and not accepted:
            self._effects.stop.set()
        return accepted

    def take(self, reading: Reading) -> None:
        """The sources were read again: take over what can change. Refused settings change nothing.

        What cannot change while running is told.
        """
        try:
            settings = reading.settings(self._facts)
        except SettingsError as error:
            self.reject(error)
            return
        self._reading, self._refused = reading, None
        for warning in reading.warnings:
            log.warning("config.ignored", what=warning)
        log.info("config.applied", changed=self._apply(settings))
        waiting = _at_next_start(self._running, settings)
        if waiting:
            log.warning("config.needs_restart", sections=waiting)

    def reject(self, error: SettingsError) -> None:
        """Settings were refused, and the last good ones stay: say so."""
        log.error("config.rejected", err=str(error))
        self._effects.say(NodeEvent("ConfigRejected", str(error), warning=True))

    def _learn(self, facts: NodeFacts) -> bool:
        """Resolve for these facts; False, with nothing changed, when that gives no settings."""
        if facts in (self._facts, self._refused):
            return facts == self._facts
        try:
            settings = self._reading.settings(facts)
        except SettingsError as error:
            self.refusal, self._refused = error, facts
            self.reject(error)
            return False
        self._facts, self._refused = facts, None
        if self._apply(settings):
            log.info("config.fitted", node=facts.name, gpus=len(facts.gpu_models or ()))
        return True

    def _apply(self, settings: Settings) -> bool:
        cells = self._cells
        changed = cells.sharing.set(settings.sharing)
        changed = cells.report.set(settings.report) or changed
        changed = cells.edits.set(settings.edits) or changed
        if changed:
            self._effects.refresh()
        return changed


def _at_next_start(running: Settings, settings: Settings) -> list[str]:
    """The sections that differ and act only at the next start."""
    names = [field.name for field in dataclasses.fields(settings)]
    return [
        name
        for name in names
        if name not in LIVE and getattr(running, name) != getattr(settings, name)
    ]
