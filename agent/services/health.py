"""Driver events and probes become verdicts; what they mean is decided in agent.core.health."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import structlog

from agent.core.condition import Condition, Health
from agent.core.errors import DriverError, cap
from agent.core.events import DriverEvent, EventKind, Probe, ProbeOutcome
from agent.core.gpu import GpuUuid
from agent.core.health import HealthSettings, aged, judge, remembered
from agent.core.inventory import Inventory
from agent.core.ports import Clock, Driver
from agent.kit.cell import Cell
from agent.kit.tally import Tally

SETTLED: Final = 5.0
"""A stream of events that has lived so long without an error is believed to hear."""

FIRST_RETRY: Final = 0.5
LAST_RETRY: Final = 30.0
TICK: Final = 0.001
"""A timer may come a little before its time: wait at least so long for the next one."""

MOST_PENDING: Final = 1024
"""Different reports that wait to be judged; a storm repeats a few."""

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HealthPorts:
    """Where verdicts go. `changed`: the driver says that GPUs came or went."""

    judged: Callable[[Mapping[GpuUuid, Health]], None]
    remember: Callable[[Mapping[GpuUuid, Health]], None]
    changed: Callable[[], None]


class HealthWatch:
    """Watches the GPUs of the inventory.

    What was recalled is published at construction, so that no scan ever shows an ill GPU as well.
    One verdict per GPU and batch: the first report of a storm is judged at once, what follows
    within `coalesce` seconds together. Judging time is steady: wall time at construction plus the
    loop's, so that a stepped clock neither ends nor stretches a quiet time.
    """

    def __init__(  # noqa: PLR0913 -- the parts that app joins, by keyword
        self,
        *,
        driver: Driver,
        inventory: Cell[Inventory],
        ports: HealthPorts,
        settings: HealthSettings,
        clock: Clock,
        recalled: Mapping[GpuUuid, Health],
        boot_changed: bool,
    ) -> None:
        self.xid_events = Tally("xid_events_total", "XIDs reported", ("gpu", "xid"))
        self.transitions = Tally("health_transitions_total", "Changes", ("gpu", "from", "to"))
        self._driver = driver
        self._inventory = inventory
        self._ports = ports
        self._settings = settings
        self._origin = clock.now() - dt.timedelta(seconds=_loop_time())
        self._health = {
            uuid: remembered(health, self._now(), boot_changed=boot_changed)
            for uuid, health in recalled.items()
        }
        self._pending: dict[DriverEvent | Probe, None] = {}
        self._reported = asyncio.Event()
        self._look = asyncio.Event()
        self._moved = asyncio.Event()
        self._opened_at: float | None = None
        self._deaf = False
        if self._health:
            ports.judged(dict(self._health))

    async def run(self) -> None:
        """Listen, probe and judge for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._judge_events())
            tasks.create_task(self._probe_rounds())
            tasks.create_task(self._watch_silence())

    # Reports come in.

    async def _listen(self) -> None:
        """Take in events; a stream that ends makes every GPU silent until one holds again."""
        delay = FIRST_RETRY
        while True:
            reason = "the stream of events ended"
            self._opened_at = _loop_time()
            try:
                async for event in self._driver.events():
                    self._note_event(event)
                    delay = FIRST_RETRY
            except DriverError as error:
                reason = str(error)
            if _loop_time() - self._opened_at >= SETTLED:
                delay = FIRST_RETRY
            self._opened_at = None
            if not self._deaf:
                self._deaf = True
                log.warning("driver.events_lost", err=reason)
            for uuid in self._known():
                self._note(Probe(uuid, ProbeOutcome.SILENT, reason))
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_RETRY)

    def _note_event(self, event: DriverEvent) -> None:
        if event.kind is EventKind.CHANGED:
            self._ports.changed()
            self._look.set()
            return
        if event.kind is EventKind.XID:
            self.xid_events.add(event.uuid or "unknown", str(event.xid))
        self._note(event)

    def _note(self, report: DriverEvent | Probe) -> None:
        if len(self._pending) < MOST_PENDING:
            self._pending[report] = None
        else:
            self._look.set()  # whatever this report says, the GPUs say it when asked
        self._reported.set()

    async def _probe_rounds(self) -> None:
        """Ask every GPU, rest, and so on; a wish to look ends the rest."""
        while True:
            self._look.clear()
            await self._round()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.probe_interval):
                    await self._look.wait()

    async def _round(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for uuid in self._known():
                tasks.create_task(self._probe(uuid))

    async def _probe(self, uuid: GpuUuid) -> None:
        deadline = self._settings.probe_deadline
        try:
            async with asyncio.timeout(deadline):
                probe = await self._driver.probe(uuid)
        except TimeoutError:
            probe = Probe(uuid, ProbeOutcome.SILENT, f"no answer within {deadline:g} s")
        except DriverError as error:
            probe = Probe(uuid, ProbeOutcome.SILENT, cap(str(error)))
        if probe.outcome is ProbeOutcome.PASSED and (
            self._of(uuid).condition is Condition.OK or not self._hears()
        ):
            return
        self._note(probe)

    def _hears(self) -> bool:
        """False while events cannot reach us: then a passed probe proves nothing about them."""
        if not self._deaf:
            return True
        if self._opened_at is None or _loop_time() - self._opened_at < SETTLED:
            return False
        self._deaf = False
        log.info("driver.events_back")
        return True

    # Verdicts go out.

    async def _judge_events(self) -> None:
        while True:
            await self._reported.wait()
            await asyncio.sleep(0)  # what has already arrived belongs to the same verdict
            self._reported.clear()
            reports, self._pending = tuple(self._pending), {}
            if self._publish(self._judged(reports)):
                self._look.set()
            await asyncio.sleep(self._settings.coalesce)

    def _judged(self, reports: Iterable[DriverEvent | Probe]) -> dict[GpuUuid, Health]:
        now = self._now()
        verdicts: dict[GpuUuid, Health] = {}
        for report in reports:
            for uuid in (report.uuid,) if report.uuid is not None else self._known():
                health = verdicts.get(uuid) or self._of(uuid)
                verdicts[uuid] = judge(health, report, now, self._settings)
        return verdicts

    async def _watch_silence(self) -> None:
        """Notice, to the moment, that a silent GPU has been served for long enough."""
        while True:
            self._moved.clear()
            now = self._now()
            self._publish({u: aged(one, now, self._settings) for u, one in self._health.items()})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_age()):
                    await self._moved.wait()

    def _next_age(self) -> float | None:
        """The loop's time at which the next silent GPU stops to be served."""
        hang = dt.timedelta(seconds=self._settings.driver_hang)
        ends = [
            (health.since + hang - self._origin).total_seconds()
            for health in self._health.values()
            if health.condition is Condition.UNMONITORED and health.serving
        ]
        return max(min(ends), _loop_time() + TICK) if ends else None

    def _publish(self, verdicts: Mapping[GpuUuid, Health]) -> bool:
        """Hand on what differs in one go; return whether a condition got worse or better."""
        changed = {u: health for u, health in verdicts.items() if health != self._of(u)}
        if not changed:
            return False
        moved = [self._tell(uuid, self._of(uuid), health) for uuid, health in changed.items()]
        self._health.update(changed)
        self._moved.set()
        self._ports.judged(changed)
        self._ports.remember(dict(self._health))
        return any(moved)

    def _tell(self, uuid: GpuUuid, old: Health, new: Health) -> bool:
        if (old.condition, old.serving, old.needs_reset) == (
            new.condition,
            new.serving,
            new.needs_reset,
        ):
            return False
        self.transitions.add(uuid, old.condition.value, new.condition.value)
        log.info(
            "gpu.health",
            gpu=uuid,
            was=old.condition.value,
            condition=new.condition.value,
            serving=new.serving,
            cause=new.cause,
            text=new.text,
        )
        return True

    def _known(self) -> tuple[GpuUuid, ...]:
        return tuple(gpu.uuid for gpu in self._inventory.value.gpus)

    def _of(self, uuid: GpuUuid) -> Health:
        if uuid in self._health:
            return self._health[uuid]
        shared = self._inventory.value.find(uuid)
        return shared.health if shared else Health(Condition.OK, since=self._now())

    def _now(self) -> dt.datetime:
        return self._origin + dt.timedelta(seconds=_loop_time())


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
