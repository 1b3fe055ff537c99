"""The settings of this node, resolved anew when what they depend on becomes known or changes.

Profiles ask for labels and models of GPUs, which nobody knows when the process starts.
"""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from agent.app.facts import Facts
from agent.core.changes import NodeEvent
from agent.core.errors import SettingsError
from agent.core.gpu import GpuFault, GpuUuid, Scan
from agent.core.last_good import LastGood
from agent.kit.cell import Cell
from agent.settings.profiles import NodeFacts
from agent.settings.reading import last_good, recalled
from agent.settings.sections import Settings
from agent.settings.sources import Sources
from agent.settings.values import Plan

TOLD: Final = 16
"""Reasons of refusals that are remembered, so that each is said once."""

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
    told to the scheduler waits for it. `copy` is what to keep on disk: the sources in force, once
    they fitted the GPUs.
    """

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        cells: Facts,
        effects: Effects,
    ) -> None:
        self.refusal: SettingsError | None = None
        self.labelled = asyncio.Event()
        self.copy: Cell[LastGood | None] = Cell(None)
        self._running = plan.fixed()
        self._plan = plan
        self._cells = cells
        self._effects = effects
        self._facts = NodeFacts(settings.node)
        self._refused: NodeFacts | None = None
        self._models: dict[GpuUuid, str] = {}
        self._former: dict[GpuUuid, str] = {}
        self._fitted: frozenset[GpuUuid] = frozenset()
        self._stored: LastGood | None = None
        self._told: deque[str] = deque(maxlen=TOLD)
        self._waiting: Mapping[str, object] = {}

    @property
    def sources(self) -> Sources:
        """The sources in force."""
        return self._plan.sources

    async def run(self) -> None:
        """Follow the labels of this Node for ever; while it is not seen, the last ones hold."""
        async for node in self._cells.node.follow():
            if node is not None:
                self._learn(dataclasses.replace(self._facts, labels=node.labels))
                self.labelled.set()

    def recall(self, stored: LastGood | None) -> None:
        """Before all else: what is on disk. The Node's labels of then hold until it is seen."""
        self._stored = stored
        if stored is not None and stored.labels is not None and stored.node == self._facts.name:
            self._learn(dataclasses.replace(self._facts, labels=stored.labels))

    def saw_gpus(self, scan: Scan) -> Scan | None:
        """The driver was asked: take in its GPUs' models, and say what may be listed of them.

        None: nothing, at the first scan. Later the settings may not fit GPUs that came: those are
        left out, and what is known of the others counts.
        """
        first = self._facts.gpu_models is None
        facts = self._with_models(scan)
        if self._learn(facts) or (first and self._recover(facts)):
            self._fitted = frozenset(self._models)
            return scan
        return None if first else _without(scan, self._fitted)

    def take(self, plan: Plan, *, asked: bool = False) -> None:
        """The sources are others: take over what can change. Refused settings change nothing.

        What cannot change while running is told. `asked`: see `reject`.
        """
        try:
            settings = plan.settings(self._facts)
        except SettingsError as error:
            self.reject(error, asked=asked)
            return
        self._plan, self._refused = plan, None
        self._told.clear()
        for warning in plan.warnings:
            log.warning("config.ignored", what=warning)
        log.info("config.applied", changed=self._apply(settings))
        self._tell_waiting(plan)

    def keep(self, *, asked: bool) -> None:
        """The sources are those in force; after a refusal, or where somebody asked, say so."""
        if self._told or asked:
            log.info("config.unchanged")
        self._told.clear()

    def reject(self, error: SettingsError, *, asked: bool = False) -> None:
        """Settings were refused, and the last good ones stay: say so, once for each reason.

        Whoever `asked` is answered in the log each time; the Event is there already.
        """
        is_new = str(error) not in self._told
        if is_new or asked:
            log.error("config.rejected", err=str(error))
        if not is_new:
            return
        self._told.append(str(error))
        self._effects.say(NodeEvent("ConfigRejected", str(error), warning=True))

    def _learn(self, facts: NodeFacts) -> bool:
        """Resolve for these facts; False, with nothing changed, when that gives no settings."""
        if facts in (self._facts, self._refused):
            return facts == self._facts
        try:
            settings = self._plan.settings(facts)
        except SettingsError as error:
            self._refused = facts
            if self._facts.gpu_models is None and facts.gpu_models is not None:
                self.refusal = error
            else:
                self.reject(error)
            return False
        self._fit(settings, facts)
        return True

    def _recover(self, facts: NodeFacts) -> bool:
        """The first GPUs do not fit: go back to the last good settings, or end and say why.

        Whoever ends has one line for it in the log, which is not this one's.
        """
        refusal = self.refusal
        if refusal is None or self._effects.stop.is_set():
            return False
        if self._go_back(facts):
            self.reject(refusal)
            return True
        self._effects.say(NodeEvent("ConfigRejected", str(refusal), warning=True))
        self._effects.stop.set()
        return False

    def _with_models(self, scan: Scan) -> NodeFacts:
        """What is known with this scan; models of GPUs that are gone count until others come.

        A driver that is unloaded and loaded again is no reason for other settings in between.
        """
        known = self._former | self._models
        silent = {fault.gpu for fault in scan.faults}
        self._models = {uuid: name for uuid, name in known.items() if uuid in silent}
        self._models |= {gpu.uuid: gpu.name for gpu in scan.gpus}
        same = self._models.keys() <= known.keys()
        gone = {uuid: name for uuid, name in known.items() if uuid not in self._models}
        self._former = gone if same else {}
        return dataclasses.replace(
            self._facts,
            gpu_models=tuple(self._models.values()),
            former_models=tuple(self._former.values()),
        )

    def _go_back(self, facts: NodeFacts) -> bool:
        """Take the last good settings for GPUs that the present ones do not fit."""
        now = self._plan
        if self._stored is None:
            return False
        then = recalled(self._stored, now.sources)
        if then is None or then.sources == now.sources:
            return False
        try:
            settings = then.settings(facts)
        except SettingsError:
            return False
        self._plan, self.refusal = then, None
        self._fit(settings, facts)
        return True

    def _fit(self, settings: Settings, facts: NodeFacts) -> None:
        if self._refused is not None and self._refused != facts:
            self._told.clear()  # what was refused is over; should it come again, it is said again
        self._facts, self._refused = facts, None
        if self._apply(settings):
            log.info("config.fitted", node=facts.name, gpus=len(facts.gpu_models or ()))

    def _apply(self, settings: Settings) -> bool:
        cells = self._cells
        changed = cells.sharing.set(settings.sharing)
        changed = cells.report.set(settings.report) or changed
        changed = cells.edits.set(settings.edits) or changed
        if changed:
            self._effects.refresh()
        if self._facts.gpu_models is not None:
            self.copy.set(last_good(self._plan.sources, self._facts))
        return changed

    def _tell_waiting(self, plan: Plan) -> None:
        """Name the settings that differ and act only at the next start, once."""
        wanted = plan.fixed()
        waiting = {key: wanted[key] for key, value in self._running.items() if wanted[key] != value}
        if waiting and waiting != self._waiting:
            log.warning("config.needs_restart", settings=list(waiting))
        self._waiting = waiting


def _without(scan: Scan, fitted: frozenset[GpuUuid]) -> Scan:
    """The scan without the GPUs that came after the settings last fitted."""
    reason = "the settings do not fit so many GPUs: see Event ConfigRejected"
    new = [GpuFault(gpu.uuid, reason) for gpu in scan.gpus if gpu.uuid not in fitted]
    gpus = tuple(gpu for gpu in scan.gpus if gpu.uuid in fitted)
    return dataclasses.replace(scan, gpus=gpus, faults=(*scan.faults, *new))
