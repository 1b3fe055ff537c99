"""Keeps the settings of this node: reads their files, publishes settings, saves a copy.

The files are read every 5 s, as no event tells of a change on every file system. Each read is
judged by what is known then: the Node's labels, unknown at the first start, and the rows.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

import structlog

from agent import __version__
from agent.cluster import NodeEvent, NodeView, PodTable
from agent.errors import SettingsError
from agent.host.system import Systemd
from agent.kit.cell import Cell
from agent.kit.timing import IdleWaiter, Lag, await_event, until_tick
from agent.kubelet.door import PREFERENCE_FOLLOWED
from agent.ledger import LastGood, Ledger
from agent.model import Inventory, SliceList
from agent.ports import Disk
from agent.settings.reading import (
    COPY,
    LASTING,
    SCHEDULER,
    Labels,
    NodeValues,
    Sources,
    SourcesRead,
)
from agent.settings.schema import Settings
from agent.state import LAST_GOOD_KIND, seal

PERIOD: Final = 5.0
"""Seconds between two reads of the files. It is also the wait after what could not act."""

STILL: Final = 0.2
"""Changed files count as written when two reads, this many seconds apart, find the same."""

LABELS_DEADLINE: Final = 2.0
"""Seconds that the first start of all waits for the Node's labels."""

log = structlog.get_logger(__name__)


class SharedCells:
    """Cells that more than one room reads: the settings of the start, and nothing else known yet.

    Each has one writer: `SettingsService` for sharing, resource, report, edits and match;
    `inventory` for inventory and slices; `kube` for pods and node.
    """

    def __init__(self, settings: Settings) -> None:
        self.sharing = Cell(settings.sharing)
        self.resource = Cell(settings.sharing.resource)
        self.report = Cell(settings.report)
        self.edits = Cell(settings.edits)
        self.match = Cell(settings.match)
        self.inventory = Cell(Inventory())
        self.slices = Cell(SliceList())
        self.pods = Cell(PodTable())
        self.node: Cell[NodeView | None] = Cell(None)


@dataclasses.dataclass(eq=False)
class SettingsService:
    """Sole writer of the cells of settings, and of their last good copy on disk.

    - `start`: settings that the rows allow. `stored`: the copy on disk; its labels count until the
      Node is seen. `copy`: what to keep there, the sources in force.
    - `asked`: set to request a read now. `calls`: which answers are in progress.
    - `plan`, `values`, `profiles`: the settings in force, and the profiles that gave them.
      `pending`: keys that take effect only at the next start. `fault`: why not all is in force.
    - `labels`: may be newer than the settings in force, if they do not fit. `labelled`: they are
      known and applied; the report to the scheduler waits for it.
    """

    start: SourcesRead
    stored: LastGood | None
    cells: SharedCells
    look: Callable[[SourcesRead | None, Sources], Awaitable[SourcesRead]]
    asked: asyncio.Event
    disk: Disk
    notifier: Systemd
    refresh: Callable[[], None]
    say: Callable[[NodeEvent], None]
    ledger: Cell[Ledger]
    calls: IdleWaiter

    def __post_init__(self) -> None:
        plan, copy = self.start.taken(), self.stored
        self.labelled = asyncio.Event()
        self.copy: Cell[LastGood | None] = Cell(None)
        self.fault: SettingsError | None = None
        self._running, self.pending = plan.fixed(), list[str]()
        self._read: SourcesRead | None = None
        self.name = plan.name
        self.labels: Labels = None
        self._apply(plan)
        if copy is not None and copy.node == plan.name:
            self._follow(copy.labels)

    async def follow_labels(self, labels: Cell[Labels]) -> None:
        """Apply the Node's labels."""
        async for seen in labels.follow():
            if seen is not None:
                self._follow(seen)
                self.labelled.set()

    def _follow(self, labels: Labels) -> None:
        """Build the settings in force for these labels, or keep them as they were."""
        if labels == self.labels:
            return
        self.labels = labels
        try:
            if self._apply(self.plan):
                log.info("config.fitted", node=self.name)
        except SettingsError as error:  # an entry of config.json for these labels does not fit
            self._refuse(error)

    async def await_labels(self) -> None:
        """Wait LABELS_DEADLINE at most for labels that decide."""
        if self.plan.need_labels(self.name, self.labels):
            with contextlib.suppress(TimeoutError):
                async with Lag().within(LABELS_DEADLINE):
                    await self.labelled.wait()

    async def follow_files(self) -> NoReturn:
        """Read the sources every PERIOD seconds, and at once on request."""
        await self.read()  # a standby may have read its settings days ago
        while True:
            is_asked = await await_event(self.asked, until_tick(PERIOD, turn=1))
            self.asked.clear()
            if is_asked:
                self.notifier.reloading()
            try:
                await self.read(asked=is_asked)
            finally:
                if is_asked:  # systemd waits for the end of a reload
                    self.notifier.tell("READY=1")

    async def read(self, *, asked: bool = False) -> None:
        """Read the sources, and apply them or log why not.

        `asked`: the operator requested it, so the log has an answer each time.
        """
        before, good = self._read, self.plan.sources
        read = self._read = await self.look(before, good)

        # Whoever writes a file may be half way. A request does not wait for the rest.
        if not (asked or read is before) and (
            await await_event(self.asked, STILL) or await self.look(read, good) is not read
        ):
            return

        if read.refusal is not None:
            self._refuse(read.refusal, asked=asked)
            return
        plan = read.taken()
        if plan.sources == self.plan.sources and self.fault is None:
            if asked:
                log.info("config.unchanged")
            return

        # Another name or scheduler takes effect in a pause of the kubelet's calls: the row of an
        # answer in progress counts, and would be one under the old settings.
        wanted = plan.resolve()
        if any(wanted[one].value != self.values[one].value for one in LASTING):
            try:
                async with asyncio.timeout(PERIOD):
                    await self.calls.idle_for(PREFERENCE_FOLLOWED)
            except TimeoutError:
                return  # the next read tries it again
        self.take(plan, asked=asked)

    def take(self, plan: NodeValues, *, asked: bool = False) -> None:
        """Apply changed sources. Refused settings change nothing. `asked`: see `read`."""
        try:
            plan.check_rows(self.ledger.value)
            changed = self._apply(plan)
        except SettingsError as error:
            self._refuse(error, asked=asked)
            return

        self.fault = None
        for warning in plan.warnings:
            log.warning("config.ignored", what=warning)
        log.info("config.applied", changed=changed)
        former = self.pending
        self.pending = [key for key, value in plan.fixed().items() if self._running[key] != value]
        if self.pending and self.pending != former:
            log.warning(
                "config.needs_restart",
                settings=self.pending,
                what="restart the agent; from HAMi's scheduler to none also remove the report from "
                "the Node (RUNBOOK)",
            )

    def tell_start(self, start: SourcesRead) -> None:
        """Report what of the sources is not in force since the start."""
        if start.refusal is not None:
            self._refuse(start.refusal)
        if self.values[SCHEDULER].value != "none" and not self.plan.knows_requests:
            log.warning(
                "config.requests_unchecked",
                what="no annotation is checked against what its pod requests: mount the ConfigMap "
                "with device-config.yaml (files.deviceConfig)",
            )

    def _apply(self, plan: NodeValues) -> bool:
        """Put the settings for the node and its labels into force. True: that changed a cell.

        Raises SettingsError: they do not fit, and nothing changed.
        """
        settings = plan.settings(self.name, self.labels)
        self.plan, self.values = plan, plan.resolve(self.name, self.labels)
        self.profiles = tuple(one.name for one in plan.applied(self.name, self.labels) if one.name)

        cells = self.cells
        cells.resource.set(settings.sharing.resource)
        changed = [
            cells.sharing.set(settings.sharing),
            cells.report.set(settings.report),
            cells.edits.set(settings.edits),
            cells.match.set(settings.match),
        ]
        if any(changed):
            self.refresh()

        files = plan.sources.device_config, plan.sources.own, plan.sources.node_config
        self.copy.set(LastGood(__version__, self.name, self.labels, *files))
        return any(changed)

    def _refuse(self, error: SettingsError, *, asked: bool = False) -> None:
        """Keep the settings in force, and report why once, or in the log to each who asked."""
        is_new = str(error) != str(self.fault)
        self.fault = error
        if is_new or asked:
            log.error("config.rejected", err=str(error))
        if is_new:
            self.say(NodeEvent("ConfigRejected", str(error), warning=True))

    async def keep_copy(self) -> None:
        """Write the copy when it differs from the one on disk. Raises StateError."""
        async for copy in self.copy.follow():
            if copy is not None and copy != self.stored:
                await self.disk.replace(COPY, seal(LAST_GOOD_KIND, copy))
                self.stored = copy
                log.debug("config.copied", file=COPY)
