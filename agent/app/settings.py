"""The settings of this node: files watched and read, the last good ones kept, what fits published.

Profiles ask for labels and models of GPUs, which nobody knows when the process starts: settings are
made anew when these become known or change, as when a file does.
"""

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Final, NoReturn

import structlog

from agent.app.facts import SharedCells
from agent.codec.last_good import encode_last_good
from agent.core.cluster.changes import NodeEvent
from agent.core.errors import SettingsError, StateError
from agent.core.inventory.gpu import GpuFault, GpuUuid, Scan
from agent.core.node.drained import SCHEDULER
from agent.core.ports import Disk, FileWatch, ServiceNotifier
from agent.core.state.last_good import LastGood
from agent.core.state.ledger import Ledger
from agent.kit.cell import Cell
from agent.kit.lull import Lull
from agent.settings.profiles import NodeFacts
from agent.settings.reading import COPY, SourcesRead, last_good, recalled
from agent.settings.sections import Settings
from agent.settings.sources import Sources
from agent.settings.values import NodeValues

STILL: Final = 0.2
"""Seconds without a change after which files count as written."""
RESTLESS: Final = 2.0
"""Seconds after which files are read although they change again and again."""
RETRY: Final = 30.0
"""Seconds until a disk that did not take the copy is tried again."""
AGAIN: Final = 5.0
"""Seconds until files are read again that did not answer."""
TOLD: Final = 16
"""Reasons of refusals that are remembered, so that each is said once."""

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class SettingsPorts:
    """What the service reads from and acts on. `look` looks at all sources again.

    `asked` is set by who wants it now. A change has the inventory `refresh`; `say` tells an Event;
    `stop` ends the process. `ledger` says who holds slices, `calls` which answers are under way.
    """

    look: Callable[[Sources], Awaitable[SourcesRead]]
    files: FileWatch
    asked: asyncio.Event
    disk: Disk
    notifier: ServiceNotifier
    refresh: Callable[[], None]
    say: Callable[[NodeEvent], None]
    stop: asyncio.Event
    ledger: Cell[Ledger]
    calls: Lull


def fitting(start: SourcesRead, stored: LastGood | None, ledger: Ledger) -> SourcesRead:
    """The start with settings that the rows allow: those that were read, else the last good ones.

    Raises SettingsError: neither are.
    """
    refusal = start.taken().undrained(ledger)
    if refusal is None:
        return start
    last = None if stored is None else recalled(stored, start.sources)
    if last is None or last.undrained(ledger) is not None:
        raise SettingsError(
            f"{refusal}. Without an agent no slice is given back, and there are no last good "
            "settings to run with: set it back first"
        )
    return dataclasses.replace(start, plan=last, refusal=start.refusal or refusal)


class SettingsService:
    """Sole writer of the cells of settings, and of their last good copy on disk.

    `refusal`: the settings cannot serve the GPUs that the first scan showed; `stop` is set then.
    `labelled` is set once the Node's labels are known and the inventory follows from them: what is
    told to the scheduler waits for it. `copy` is what to keep on disk: the sources in force, once
    they fitted the GPUs.
    """

    def __init__(
        self, start: SourcesRead, settings: Settings, cells: SharedCells, outside: SettingsPorts
    ) -> None:
        self.refusal: SettingsError | None = None
        self.labelled = asyncio.Event()
        self.copy: Cell[LastGood | None] = Cell(None)
        self._plan = start.taken()
        self._running = self._plan.fixed()
        self._files = start.asked
        self._cells = cells
        self._outside = outside
        self._facts = NodeFacts(settings.node)
        self._refused: NodeFacts | None = None
        self._undrained: NodeValues | None = None
        self._fitted: frozenset[GpuUuid] = frozenset()
        self._stored: LastGood | None = None
        self._told: deque[str] = deque(maxlen=TOLD)
        self._waiting: Mapping[str, object] = {}
        self._news = asyncio.Event()
        self._is_asked = False

    def recall(self, stored: LastGood | None) -> None:
        """Before all else: what is on disk. The Node's labels of then hold until it is seen."""
        self._stored = stored
        if stored is not None and stored.labels is not None and stored.node == self._facts.name:
            self._learn(dataclasses.replace(self._facts, labels=stored.labels))

    async def run(self) -> None:
        """Follow the Node's labels, the rows and the files, and keep the copy, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_labels())
            group.create_task(self._follow_rows())
            group.create_task(self._follow_files())
            group.create_task(self._keep_copy())

    def saw_gpus(self, scan: Scan) -> Scan | None:
        """The driver was asked: take in its GPUs' models, and say what may be listed of them.

        None: nothing, at the first scan. Later the settings may not fit GPUs that came: those are
        left out, and what is known of the others counts.
        """
        first = self._facts.gpus is None
        facts = self._facts.after(scan)
        if self._learn(facts) or (first and self._recover(facts)):
            self._fitted = frozenset(map(GpuUuid, facts.gpus or ()))
            return scan
        return None if first else _without(scan, self._fitted)

    async def read(self, *, asked: bool = False) -> None:
        """Look at the sources, and take them over or say why not.

        `asked`: somebody wants it now, and is answered in the log each time.
        """
        with self._telling() if asked else contextlib.nullcontext():
            found = await self._outside.look(self._plan.sources)
            # Refused ones may not have told of all files, so that those before are watched as well.
            self._files = found.asked | (self._files if found.refusal else frozenset())
            if found.silent:
                asyncio.get_running_loop().call_later(AGAIN, self._news.set)
            if found.refusal is not None:
                self.reject(found.refusal, asked=asked)
            elif found.plan is None:
                self._keep(asked=asked)
            else:
                if found.plan.lasting() != self._plan.lasting():
                    await self._outside.calls.come(0)  # the row of one under way counts as well
                self.take(found.plan, asked=asked)

    def take(self, plan: NodeValues, *, asked: bool = False) -> None:
        """The sources are others: take over what can change. Refused settings change nothing.

        What cannot change while running is told. `asked`: see `read`.
        """
        try:
            settings = plan.settings(self._facts)
        except SettingsError as error:
            self.reject(error, asked=asked)
            return
        refusal = plan.undrained(self._outside.ledger.value)
        if refusal is not None:
            self._undrained = plan
            self.reject(refusal, asked=asked)
            return
        self._plan, self._refused, self._undrained = plan, None, None
        self._told.clear()
        for warning in plan.warnings:
            log.warning("config.ignored", what=warning)
        log.info("config.applied", changed=self._publish(settings))
        self._tell_waiting(plan)

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
        self._outside.say(NodeEvent("ConfigRejected", str(error), warning=True))

    def _keep(self, *, asked: bool) -> None:
        """The sources are those in force; after a refusal, or where somebody asked, say so."""
        if self._told or asked:
            log.info("config.unchanged")
        self._told.clear()
        self._undrained = None

    async def _follow_labels(self) -> None:
        """While the Node is not seen, its last labels hold."""
        async for node in self._cells.node.follow():
            if node is not None:
                self._learn(dataclasses.replace(self._facts, labels=node.labels))
                self.labelled.set()

    async def _follow_rows(self) -> None:
        """Look at the sources again once nobody holds slices under other settings any more."""
        async for ledger in self._outside.ledger.follow():
            if self._undrained is not None and self._undrained.undrained(ledger) is None:
                self._undrained = None
                self._news.set()

    async def _follow_files(self) -> NoReturn:
        """Read them as soon as they are watched, and when they changed and lie still."""
        while True:
            files = self._files
            async with asyncio.TaskGroup() as group:
                tasks = (
                    group.create_task(self._outside.files.follow(files, self._news.set)),
                    group.create_task(self._listen()),
                )
                while self._files == files:
                    await self._news.wait()
                    await self._settle()
                    is_asked, self._is_asked = self._is_asked, False
                    self._news.clear()
                    await self.read(asked=is_asked)
                for task in tasks:
                    task.cancel()

    async def _listen(self) -> NoReturn:
        while True:
            await self._outside.asked.wait()
            self._outside.asked.clear()
            self._is_asked = True
            self._news.set()

    async def _settle(self) -> None:
        """Return once nothing has changed for a moment, at once if somebody asks."""
        loop = asyncio.get_running_loop()
        end = loop.time() + RESTLESS
        while not self._is_asked and loop.time() < end:
            self._news.clear()
            try:
                async with asyncio.timeout(STILL):
                    await self._news.wait()
            except TimeoutError:
                return

    async def _keep_copy(self) -> None:
        """Write the copy whenever it differs from what is on disk; a disk that is full may mend."""
        is_failing = False
        async for _ in self.copy.follow():
            while (copy := self.copy.value) is not None and copy != self._stored:
                try:
                    await self._outside.disk.replace(COPY, encode_last_good(copy))
                except StateError as error:
                    if not is_failing:
                        log.warning("config.copy_unwritable", err=str(error))
                    is_failing = True
                    await asyncio.sleep(RETRY)
                else:
                    self._stored, is_failing = copy, False
                    log.debug("config.copied", file=COPY)

    def _learn(self, facts: NodeFacts) -> bool:
        """Make settings for these facts; False, with nothing changed, when there are none."""
        if facts in (self._facts, self._refused):
            return facts == self._facts
        try:
            settings = self._plan.settings(facts)
        except SettingsError as error:
            self._refused = facts
            if self._facts.gpus is None and facts.gpus is not None:
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
        if refusal is None or self._outside.stop.is_set():
            return False
        if self._go_back(facts):
            self.reject(refusal)
            return True
        self._outside.say(NodeEvent("ConfigRejected", str(refusal), warning=True))
        self._outside.stop.set()
        return False

    def _go_back(self, facts: NodeFacts) -> bool:
        """Take the last good settings for GPUs that the present ones do not fit."""
        now = self._plan.sources
        then = None if self._stored is None else recalled(self._stored, now)
        if then is None or then.sources == now or then.undrained(self._outside.ledger.value):
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
        if self._publish(settings):
            log.info("config.fitted", node=facts.name, gpus=len(facts.gpus or ()))

    def _publish(self, settings: Settings) -> bool:
        """Into the cells; True when that changed something."""
        cells = self._cells
        cells.resource.set(settings.sharing.resource)
        changed = cells.sharing.set(settings.sharing)
        changed = cells.report.set(settings.report) or changed
        changed = cells.edits.set(settings.edits) or changed
        if changed:
            self._outside.refresh()
        if self._facts.gpus is not None and not self._waits_to_switch:
            self.copy.set(last_good(self._plan.sources, self._facts))
        return changed

    @property
    def _waits_to_switch(self) -> bool:
        """Whether the next start has another scheduler: what is answered until then is of this one.

        Should pods hold slices at that start, the last good settings have to fit them.
        """
        return self._plan.fixed()[SCHEDULER] != self._running[SCHEDULER]

    def _tell_waiting(self, plan: NodeValues) -> None:
        """Name the settings that differ and act only at the next start, once."""
        wanted = plan.fixed()
        waiting = {key: wanted[key] for key, value in self._running.items() if wanted[key] != value}
        if waiting and waiting != self._waiting:
            log.warning("config.needs_restart", settings=list(waiting))
        self._waiting = waiting

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell systemd of a reload that was asked for."""
        self._outside.notifier.reloading()
        try:
            yield
        finally:
            self._outside.notifier.ready()


def _without(scan: Scan, fitted: frozenset[GpuUuid]) -> Scan:
    """The scan without the GPUs that came after the settings last fitted."""
    reason = "the settings do not fit so many GPUs: see Event ConfigRejected"
    new = [GpuFault(gpu.uuid, reason) for gpu in scan.gpus if gpu.uuid not in fitted]
    gpus = tuple(gpu for gpu in scan.gpus if gpu.uuid in fitted)
    return dataclasses.replace(scan, gpus=gpus, faults=(*scan.faults, *new))
