"""Keeps the settings of this node: watches and reads files, publishes settings, saves a copy.

Profiles may select by labels, which are unknown at the start. The settings are built
again when these become known or change, and when a file changes. Another scheduler or resource name
is refused, with all that came with it, while pods hold slices; the last of them has it read again.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Final, NoReturn

import msgspec
import structlog

from agent.app.adapters import SharedCells
from agent.cluster import NodeEvent
from agent.errors import SettingsError, StateError
from agent.host.process import Systemd
from agent.kit.cell import Cell
from agent.kit.timing import Lag, Lull
from agent.kubelet.door import PREFERENCE_FOLLOWED
from agent.ledger import LastGood, Ledger
from agent.model import GpuUuid, Scan
from agent.node.devices import SCHEDULER
from agent.ports import Disk
from agent.settings.reading import COPY, SourcesRead, last_good, recalled
from agent.settings.schema import Settings, Values
from agent.settings.sources import NodeFacts, Sources
from agent.settings.values import NodeValues
from agent.state import encode_last_good

STILL: Final = 0.2
"""Files count as written after this many seconds without a change."""
RESTLESS: Final = 2.0
"""Files that keep changing are read after this many seconds."""
RETRY: Final = 30.0
"""Seconds until a failed write of the copy is tried again."""
LABELS: Final = 2.0
"""Seconds that the first start of all waits for the Node's labels."""
AGAIN: Final = 5.0
"""Seconds until files are read again that did not answer, or whose settings could not act."""
QUIET: Final = 10.0
"""Seconds for the kubelet's calls to pause, before another name or scheduler takes effect."""
TOLD: Final = 16
"""Reasons of refusals to remember, so that each is logged once."""

_UNLABELLED = f"the Node is not seen after {LABELS:g} s: what selects by labels does not apply yet"
_BUSY = f"the kubelet admits pods without a pause; the settings are read again in {AGAIN:g} s"
_UNFIT = "the settings do not fit so many GPUs: see Event ConfigRejected"
_RESTART = "these settings take effect at the next start: restart the agent"
_UNCHECKED = (
    "no settings of HAMi's scheduler (files.deviceConfig): no annotation is checked against what "
    "its pod requests; mount the ConfigMap with device-config.yaml"
)
_REPORTED = "; remove the report from the Node, or HAMi's scheduler may still place pods (RUNBOOK)"

log = structlog.get_logger(__name__)


class SettingsPorts(msgspec.Struct, frozen=True):
    """What the service reads and acts on. `look` reads all sources again.

    `asked`: set to request a read now. `refresh`: rebuilds the inventory after a change. `say`:
    posts an Event. `stop`: ends the process. `ledger`: who holds slices. `calls`: which answers are
    in progress.
    """

    look: Callable[[Sources], Awaitable[SourcesRead]]
    watch: Callable[[Collection[Path], Callable[[], None]], Coroutine[None, None, NoReturn]]
    asked: asyncio.Event
    disk: Disk
    notifier: Systemd
    refresh: Callable[[], None]
    say: Callable[[NodeEvent], None]
    stop: asyncio.Event
    ledger: Cell[Ledger]
    calls: Lull


class SettingsService:
    """Sole writer of the cells of settings, and of their last good copy on disk.

    `refusal`: the settings do not fit the GPUs of the first scan; `stop` is set then. `labelled`:
    set when the Node's labels are known and applied to the inventory; the report to the scheduler
    waits for it. `copy`: what to keep on disk, the sources in force once they fit the GPUs.
    `profiles`: the names of those that apply.
    `start`: has settings that the rows allow.
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
        self.profiles = self._plan.resolve(self._facts).profiles
        self._unfit: SettingsError | None = None
        self._unread: SettingsError | None = None
        self._stored: LastGood | None = None
        self._reported: deque[str] = deque(maxlen=TOLD)
        self._late: Mapping[str, object] = {}
        self._undrained: NodeValues | None = None
        self._news = asyncio.Event()
        self._is_asked = False

    def recall(self, stored: LastGood | None) -> None:
        """Take over the stored copy, first of all. Its labels count until the Node is seen."""
        self._stored = stored
        if stored is not None and stored.labels is not None and stored.node == self._facts.name:
            self._learn(msgspec.structs.replace(self._facts, labels=stored.labels))

    async def run(self) -> None:
        """Follow the Node's labels, the rows and the files, and save the copy, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_labels())
            group.create_task(self._follow_rows())
            group.create_task(self._follow_files())
            group.create_task(self._keep_copy())

    async def await_labels(self) -> None:
        """Wait for the Node's labels, LABELS at most, if they decide and no run has seen them."""
        if self._plan.need_labels(self._facts):
            try:
                async with Lag().within(LABELS):
                    await self.labelled.wait()
            except TimeoutError:
                log.warning("config.labels_unknown", what=_UNLABELLED)

    def saw_gpus(self, scan: Scan) -> Scan | None:
        """Count the GPUs of a scan, and return the part of it that may be listed.

        If the settings do not fit, GPUs that came after the first scan are left out. None: the
        settings do not fit the first scan.
        """
        first = self._facts.gpus is None
        known = self._facts.gpus or frozenset()
        silent = known & {fault.gpu for fault in scan.faults}
        gpus = silent.union(gpu.uuid for gpu in scan.gpus)
        facts = msgspec.structs.replace(self._facts, gpus=gpus)
        if self._learn(facts) or (first and self._recover(facts)):
            return scan
        return None if first else scan.keeping(frozenset(map(GpuUuid, known)), _UNFIT)

    async def read(self, *, asked: bool = False) -> None:
        """Read the sources, and apply them or log why not.

        `asked`: the operator requested it, so the log has an answer each time.
        """
        with contextlib.ExitStack() as stack:
            if asked:  # systemd waits for the end of a reload
                self._outside.notifier.reloading()
                stack.callback(self._outside.notifier.ready)
            result = await self._outside.look(self._plan.sources)
            # A refused read may not name all files: the earlier ones stay watched.
            self._files = result.asked | (self._files if result.refusal else frozenset())
            if result.silent:
                asyncio.get_running_loop().call_later(AGAIN, self._news.set)
            if result.refusal is not None:
                self.reject(result.refusal, asked=asked)
            elif result.plan is None:
                if self._reported or asked:
                    log.info("config.unchanged")
                self._reported.clear()
                self._unread = self._undrained = None
            elif await self._may_change(result.plan):
                self.take(result.plan, asked=asked)

    async def _may_change(self, plan: NodeValues) -> bool:
        """Wait for a pause in the kubelet's calls before another name or scheduler.

        The row of an answer in progress counts, and would be one under the old settings.
        """
        held = plan.undrained(self._outside.ledger.value)
        if held is None and plan.lasting() != self._plan.lasting():
            try:
                async with asyncio.timeout(QUIET):
                    await self._outside.calls.come(PREFERENCE_FOLLOWED)
            except TimeoutError:
                log.warning("config.waits", err=_BUSY)
                asyncio.get_running_loop().call_later(AGAIN, self._news.set)
                return False
        return True

    def take(self, plan: NodeValues, *, asked: bool = False) -> None:
        """Apply changed sources. Refused settings change nothing.

        The log names the settings that take effect only at the next start. `asked`: see `read`.
        """
        held = plan.undrained(self._outside.ledger.value)
        try:
            if held is not None:
                raise held
            changed = self._apply(plan, self._facts)
        except SettingsError as error:
            self.reject(error, asked=asked)
            self._undrained = None if held is None else plan
            return
        self._unread = None
        self._reported.clear()
        for warning in plan.warnings:
            log.warning("config.ignored", what=warning)
        log.info("config.applied", changed=changed)
        wanted = plan.fixed()
        waiting = {key: wanted[key] for key, value in self._running.items() if wanted[key] != value}
        if waiting and waiting != self._late:
            what = _RESTART + _REPORTED * (waiting.get(SCHEDULER) == "none")
            log.warning("config.needs_restart", settings=list(waiting), what=what)
        self._late = waiting

    def reject(self, error: SettingsError, *, asked: bool = False) -> None:
        """Report refused sources, once for each reason. The last good settings stay in force.

        `asked`: see `read`. The log then repeats the reason; the Event is not repeated.
        """
        self._unread, self._undrained = error, None
        self._refuse(error, asked=asked)

    def tell_start(self, start: SourcesRead) -> None:
        """Report what of the sources is not in force since the start."""
        if start.refusal is not None:
            self.reject(start.refusal)
        if self._plan.labelled and not self._cells.match.value.requests.known:
            log.warning("config.requests_unchecked", what=_UNCHECKED)

    def accepted(self) -> tuple[Values, frozenset[str]]:
        """The values last accepted, and the keys that take effect only at the next start."""
        return self._plan.resolve(self._facts), frozenset(self._late)

    @property
    def trouble(self) -> str:
        """Why not all of the settings are in force; empty: they are."""
        found = (self._unread, self._unfit)
        return "; ".join(str(error) for error in found if error is not None)

    def _refuse(self, error: SettingsError, *, asked: bool = False) -> None:
        text = str(error)
        is_new = text not in self._reported
        if is_new or asked:
            log.error("config.rejected", err=text)
        if is_new:
            self._reported.append(text)
            self._outside.say(NodeEvent("ConfigRejected", text, warning=True))

    async def _follow_labels(self) -> None:
        """Apply the Node's labels. While the Node is not seen, its last labels count."""
        async for node in self._cells.node.follow():
            if node is not None:
                self._learn(msgspec.structs.replace(self._facts, labels=node.labels))
                self.labelled.set()

    async def _follow_rows(self) -> None:
        """Read the sources again when no pod holds slices under other settings any more."""
        async for ledger in self._outside.ledger.follow():
            if self._undrained is not None and self._undrained.undrained(ledger) is None:
                self._news.set()

    async def _follow_files(self) -> NoReturn:
        """Read the files when they are watched, and after each change, when it is complete."""
        while True:
            files = self._files
            async with asyncio.TaskGroup() as group:
                tasks = (
                    group.create_task(self._outside.watch(files, self._news.set)),
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
        """Return after STILL without a change, RESTLESS at most, or at once on request."""
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

    def _learn(self, facts: NodeFacts) -> bool:
        """Build the settings for these facts. False: they are refused, and nothing changed."""
        if facts == self._facts:
            return True
        was_unfit = self._unfit is not None
        try:
            changed = self._apply(self._plan, facts)
        except SettingsError as error:
            if self._facts.gpus is None and facts.gpus is not None:
                self.refusal = error
                return False
            # The labels are known, whatever the settings say; the first scan judges these again.
            self._facts = msgspec.structs.replace(self._facts, labels=facts.labels)
            if facts.gpus is not None:
                self._unfit = error
                self._refuse(error)
            return False
        if was_unfit:
            self._reported.clear()  # the refusal is over; if it comes again, it is logged again
        self._tell_fitted(changed=changed)
        return True

    def _recover(self, facts: NodeFacts) -> bool:
        """The settings do not fit the first GPUs: use the last good ones, or stop the process.

        The end of the process logs the reason, so there is no log line here.
        """
        refusal = self.refusal
        if refusal is None or self._outside.stop.is_set():
            return False
        now = self._plan.sources
        if self._stored is not None:
            with contextlib.suppress(SettingsError):
                last = recalled(self._stored, now)
                if last.sources != now and last.undrained(self._outside.ledger.value) is None:
                    self._tell_fitted(changed=self._apply(last, facts))
                    self.refusal = None
                    self.reject(refusal)
                    return True
        self._outside.say(NodeEvent("ConfigRejected", str(refusal), warning=True))
        self._outside.stop.set()
        return False

    def _apply(self, plan: NodeValues, facts: NodeFacts) -> bool:
        """Put the settings for these facts into force. True: that changed a cell.

        Raises SettingsError: they do not fit, and nothing changed.
        """
        settings = plan.settings(facts)
        self._plan, self._facts, self._unfit = plan, facts, None
        self.profiles = plan.resolve(facts).profiles
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

    def _tell_fitted(self, *, changed: bool) -> None:
        if changed:
            log.info("config.fitted", node=self._facts.name, gpus=len(self._facts.gpus or ()))
