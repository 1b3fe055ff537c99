"""Keeps the settings of this node: reads their files, publishes settings, saves a copy.

The files are read every 5 s, as no event tells of a change on every file system, and each read is
judged by what is known then: labels, which are unknown at the start, GPUs, and the rows. Another
scheduler or resource name is refused, with all that came with it, while pods hold slices.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NoReturn

import msgspec
import structlog

from agent.app.adapters import SharedCells
from agent.cluster import NodeEvent
from agent.errors import SettingsError, StateError
from agent.host.process import Systemd
from agent.kit.cell import Cell
from agent.kit.timing import IdleWaiter, Lag, await_event, until_tick
from agent.kubelet.door import PREFERENCE_FOLLOWED
from agent.ledger import LastGood, Ledger
from agent.model import GpuUuid, Scan
from agent.node.devices import SCHEDULER
from agent.ports import Disk
from agent.settings.reading import COPY, SourcesRead, last_good, stand_in
from agent.settings.schema import Settings
from agent.settings.sources import NodeFacts, Sources
from agent.settings.values import NodeValues
from agent.state import encode_last_good

PERIOD: Final = 5.0
"""Seconds between two reads of the files. It is also the wait after what could not act."""

STILL: Final = 0.2
"""Changed files count as written when two reads, this many seconds apart, find the same.

Otherwise the next PERIOD tries it again.
"""

MOST_READS: Final = 4
"""A file that changes at every read is taken as it is at this try."""

RETRY: Final = 30.0
"""Seconds until a failed write of the copy is tried again."""

LABELS_DEADLINE: Final = 2.0
"""Seconds that the first start of all waits for the Node's labels."""

PAUSE_DEADLINE: Final = 10.0
"""Seconds for the kubelet's calls to pause, before another name or scheduler takes effect."""

SOURCES: Final = "sources"
"""Files, variables and flags, as they were read last."""

NODE: Final = "node"
"""The settings in force, for the labels and GPUs of this node."""

_UNLABELLED = (
    f"the Node is not seen after {LABELS_DEADLINE:g} s: what selects by labels does not apply yet"
)
_BUSY = f"the kubelet admits pods without a pause; the settings are read again in {PERIOD:g} s"
_UNFIT = "the settings do not fit so many GPUs: see Event ConfigRejected"
_RESTART = "these settings take effect at the next start: restart the agent"
_UNCHECKED = (
    "no settings of HAMi's scheduler (files.deviceConfig): no annotation is checked against what "
    "its pod requests; mount the ConfigMap with device-config.yaml"
)
_REPORTED = "; remove the report from the Node, or HAMi's scheduler may still place pods (RUNBOOK)"

log = structlog.get_logger(__name__)


class SettingsPorts(msgspec.Struct, frozen=True):
    """What the service reads and acts on.

    `look`: reads the sources, see agent.settings.reading. `asked`: set to request a read now.
    `refresh`: rebuilds the inventory after a change. `say`: posts an Event. `stop`: ends the
    process. `ledger`: who holds slices. `calls`: which answers are in progress.
    """

    look: Callable[[SourcesRead | None, Sources], Awaitable[SourcesRead]]
    asked: asyncio.Event
    disk: Disk
    notifier: Systemd
    refresh: Callable[[], None]
    say: Callable[[NodeEvent], None]
    stop: asyncio.Event
    ledger: Cell[Ledger]
    calls: IdleWaiter


class SettingsService:
    """Sole writer of the cells of settings, and of their last good copy on disk.

    - `values`: those last accepted, with the names of the profiles that apply.
    - `labelled`: set when the Node's labels are known and applied to the inventory; the report to
      the scheduler waits for it.
    - `copy`: what to keep on disk, the sources in force once they fit the GPUs.
    - `refusal`: the settings do not fit the GPUs of the first scan; `stop` is set then.

    `start` has settings that the rows allow. `stored`: the copy on disk. Its labels count until the
    Node is seen.
    """

    def __init__(
        self,
        start: SourcesRead,
        stored: LastGood | None,
        settings: Settings,
        cells: SharedCells,
        outside: SettingsPorts,
    ) -> None:
        self.refusal: SettingsError | None = None
        self.labelled = asyncio.Event()
        self.copy: Cell[LastGood | None] = Cell(None)
        self._plan = start.taken()
        self._running = self._plan.fixed()
        self._cells = cells
        self._outside = outside
        self._facts = NodeFacts(settings.node)
        self.values = self._plan.resolve(self._facts)
        self._read: SourcesRead | None = None
        self._tries = 0
        self._faults: dict[str, SettingsError | None] = {SOURCES: None, NODE: None}
        """Why they are refused; the settings before them stay in force."""
        self._stored = stored
        if stored is not None and stored.labels is not None and stored.node == settings.node:
            self._fit(msgspec.structs.replace(self._facts, labels=stored.labels))

    async def run(self) -> None:
        """Follow the Node's labels and the files, and save the copy, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_labels())
            group.create_task(self._follow_files())
            group.create_task(self._keep_copy())

    async def await_labels(self) -> None:
        """Wait LABELS_DEADLINE at most for the Node's labels, if they decide and are unknown."""
        if self._plan.need_labels(self._facts):
            try:
                async with Lag().within(LABELS_DEADLINE):
                    await self.labelled.wait()
            except TimeoutError:
                log.warning("config.labels_unknown", what=_UNLABELLED)

    def saw_gpus(self, scan: Scan) -> Scan | None:
        """Count the GPUs of a scan, and return the part of it that may be listed.

        If the settings do not fit, GPUs that came after the first scan are left out. None: the
        settings do not fit the first scan, and no last good ones do.
        """
        known = self._facts.gpus
        silent = (known or frozenset()) & {fault.gpu for fault in scan.faults}
        gpus = silent.union(gpu.uuid for gpu in scan.gpus)
        facts = msgspec.structs.replace(self._facts, gpus=gpus)

        error = self._fit(facts)
        if error is None:
            return scan
        if known is not None:
            return scan.keeping(frozenset(map(GpuUuid, known)), _UNFIT)
        if self._outside.stop.is_set():
            return None

        last = stand_in(self._stored, self._plan.sources, facts, self._outside.ledger.value)
        if last is not None:
            self._change(last, facts)
            self._refuse(SOURCES, error)
            return scan

        # The end of the process logs the reason.
        self.refusal = error
        self._outside.say(NodeEvent("ConfigRejected", str(error), warning=True))
        self._outside.stop.set()
        return None

    async def read(self, *, asked: bool = False) -> None:
        """Read the sources, and apply them or log why not.

        `asked`: the operator requested it, so the log has an answer each time.
        """
        if asked:
            self._outside.notifier.reloading()
        try:
            await self._read_all(asked=asked)
        finally:
            if asked:  # systemd waits for the end of a reload
                self._outside.notifier.tell("READY=1")

    async def _read_all(self, *, asked: bool) -> None:
        look, good = self._outside.look, self._plan.sources
        before, self._read = self._read, await look(self._read, good)
        read = self._read

        # Whoever writes a file may be half way. A request does not wait for the rest, and what
        # changes at every read is taken in the end: it would wait for ever.
        is_whole = (
            asked
            or read is before
            or not (
                await await_event(self._outside.asked, STILL) or await look(read, good) is not read
            )
        )
        self._tries = 0 if is_whole else (self._tries + 1) % MOST_READS
        if self._tries:
            return

        if read.refusal is not None:
            self._refuse(SOURCES, read.refusal, asked=asked)
        elif read.sources == self._plan.sources:
            if asked or self._faults[SOURCES] is not None:
                log.info("config.unchanged")
            self._faults[SOURCES] = None
        else:
            await self._take_in_pause(read.taken(), again=read is before, asked=asked)

    async def _take_in_pause(self, plan: NodeValues, *, again: bool, asked: bool) -> None:
        """Apply changed sources; another name or scheduler in a pause of the kubelet's calls.

        The row of an answer in progress counts, and would be one under the old settings.
        """
        held = plan.undrained(self._outside.ledger.value)
        if held is None and plan.lasting() != self._plan.lasting():
            try:
                async with asyncio.timeout(PAUSE_DEADLINE):
                    await self._outside.calls.idle_for(PREFERENCE_FOLLOWED)
            except TimeoutError:
                log.warning("config.waits", err=_BUSY)
                return

        self.take(plan, again=again, asked=asked)

    def take(self, plan: NodeValues, *, again: bool = False, asked: bool = False) -> None:
        """Apply changed sources. Refused settings change nothing.

        The log names the settings that take effect only at the next start. `again`: the last read
        found the same. `asked`: see `read`.
        """
        pending = self.pending
        held = plan.undrained(self._outside.ledger.value)
        if held is not None and again and self._faults[SOURCES] is not None and not asked:
            self._faults[SOURCES] = held  # it was told; now others may hold the slices
            return
        try:
            if held is not None:
                raise held
            changed = self._apply(plan, self._facts)
        except SettingsError as error:
            self._refuse(SOURCES, error, asked=asked)
            return

        self._faults[SOURCES] = None
        for warning in plan.warnings:
            log.warning("config.ignored", what=warning)
        log.info("config.applied", changed=changed)
        if (late := self.pending) and late != pending:
            what = _RESTART + _REPORTED * (late.get(SCHEDULER) == "none")
            log.warning("config.needs_restart", settings=list(late), what=what)

    def tell_start(self, start: SourcesRead) -> None:
        """Report what of the sources is not in force since the start."""
        if start.refusal is not None:
            self._refuse(SOURCES, start.refusal)
        if self._plan.labelled and not self._cells.match.value.requests.known:
            log.warning("config.requests_unchecked", what=_UNCHECKED)

    @property
    def trouble(self) -> str:
        """Why not all of the settings are in force; empty: they are."""
        faults = "; ".join(str(error) for error in self._faults.values() if error is not None)
        return faults and f"the last good settings apply, because these are refused: {faults}"

    @property
    def pending(self) -> Mapping[str, object]:
        """The accepted values that take effect only at the next start, by key."""
        wanted = self._plan.fixed()
        return {key: wanted[key] for key, value in self._running.items() if wanted[key] != value}

    async def _follow_labels(self) -> None:
        """Apply the Node's labels. While the Node is not seen, its last labels count."""
        async for node in self._cells.node.follow():
            if node is not None:
                self._fit(msgspec.structs.replace(self._facts, labels=node.labels))
                self.labelled.set()

    async def _follow_files(self) -> NoReturn:
        """Read the sources every PERIOD seconds, and at once on request.

        The first time is now: a standby may have read its settings days ago.
        """
        is_asked = False
        while True:
            await self.read(asked=is_asked)
            is_asked = await await_event(self._outside.asked, until_tick(PERIOD, turn=1))
            self._outside.asked.clear()

    async def _keep_copy(self) -> None:
        """Write the copy when it differs from the one on disk. Try a failed write again."""
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

    def _fit(self, facts: NodeFacts) -> SettingsError | None:
        """Build the settings in force for these facts. Returned: why they stay as they were."""
        if facts == self._facts and self._faults[NODE] is None:
            return None
        try:
            self._change(self._plan, facts)
        except SettingsError as error:
            # The labels are known, whatever the settings say; the first scan judges these again.
            self._facts = msgspec.structs.replace(self._facts, labels=facts.labels)
            if self._facts.gpus is not None:
                self._refuse(NODE, error)
            return error
        return None

    def _change(self, plan: NodeValues, facts: NodeFacts) -> None:
        """Apply what other facts make of the settings. Raises SettingsError: they do not fit."""
        if self._apply(plan, facts):
            log.info("config.fitted", node=facts.name, gpus=len(facts.gpus or ()))

    def _apply(self, plan: NodeValues, facts: NodeFacts) -> bool:
        """Put the settings for these facts into force. True: that changed a cell.

        Raises SettingsError: they do not fit, and nothing changed.
        """
        settings = plan.settings(facts)
        self._plan, self._facts, self._faults[NODE] = plan, facts, None
        self.values = plan.resolve(facts)

        cells = self._cells
        cells.resource.set(settings.sharing.resource)
        changed = cells.sharing.set(settings.sharing)
        changed = cells.report.set(settings.report) or changed
        changed = cells.edits.set(settings.edits) or changed
        changed = cells.match.set(settings.match) or changed
        if changed:
            self._outside.refresh()
        if facts.gpus is not None:
            self.copy.set(last_good(plan.sources, facts))
        return changed

    def _refuse(self, what: str, error: SettingsError, *, asked: bool = False) -> None:
        """Keep the settings in force, and report why: an Event and a log line for each reason.

        `asked`: see `read`. The log then repeats the reason.
        """
        is_new = str(error) != str(self._faults[what])
        self._faults[what] = error
        if is_new or asked:
            log.error("config.rejected", err=str(error))
        if is_new:
            self._outside.say(NodeEvent("ConfigRejected", str(error), warning=True))
