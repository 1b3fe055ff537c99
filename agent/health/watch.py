"""Listens to events, probes the GPUs and gives the verdicts."""

import asyncio
import contextlib
import datetime as dt
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import msgspec
import structlog

from agent.errors import DriverError, GpuError, cap
from agent.health.judge import (
    HealthSettings,
    aged,
    judge,
    missing,
    remembered,
    switched_off,
    xid_class,
)
from agent.health.verdicts import (
    ALL,
    NOT_COUNTED,
    ErrorCount,
    GpuRelease,
    Ill,
    Recheck,
    as_told,
    compared,
    fail_alike,
    has_failed,
    of_the_driver,
    released,
    reset_by_word,
    taken_back,
)
from agent.health.xids import XidClass, xid_label, xid_name
from agent.kit.cell import Cell
from agent.kit.tasks import Throttle
from agent.kit.timing import Lag, Tally, until_tick
from agent.model import (
    Cause,
    Condition,
    DriverEvent,
    EventKind,
    GpuUuid,
    Health,
    Inventory,
    Probe,
    ProbeOutcome,
    Scan,
    SharedGpu,
    Trouble,
)
from agent.ports import Clock, Driver

# Probes one GPU or all GPUs. A failure that is the same on all counts as the driver's.

TURNS: Final = 2
"""How many driver deadlines a probe may take: a call ahead of it, and its own call."""
RELEASE_DEADLINE: Final = 8.0
"""Seconds for all calls in the library to end: the longest call and those that wait behind it."""


class Asking:
    """Probes GPUs, each with a deadline in seconds.

    `obstacle` returns why the agent does not receive events; empty if it does.
    """

    def __init__(self, driver: Driver, deadline: float, obstacle: Callable[[], str]) -> None:
        self._driver = driver
        self._deadline = TURNS * deadline
        self._obstacle = obstacle

    async def one(self, uuid: GpuUuid) -> Probe:
        """Probe that GPU. If the driver fails or does not answer, the outcome is SILENT."""
        try:
            async with Lag().within(self._deadline):
                probe = await self._driver.probe(uuid)
        except TimeoutError:
            return Probe(uuid, ProbeOutcome.SILENT, f"no answer within {self._deadline:g} s")
        except (DriverError, GpuError) as error:
            return Probe(uuid, ProbeOutcome.SILENT, cap(str(error)))
        if probe.outcome is ProbeOutcome.PASSED and (obstacle := self._obstacle()):
            return msgspec.structs.replace(probe, unmonitored=obstacle)
        return probe

    async def surely(self, uuid: GpuUuid, others: Collection[GpuUuid], ill: Ill) -> Probe:
        """Probe that GPU. If the probe fails, probe all: the driver may be at fault."""
        probes = {uuid: await self.one(uuid)}
        if has_failed(probes[uuid]):
            await self.all(others, ill, lambda probe: probes.update({probe.uuid: probe}))
        return probes[uuid]

    async def all(
        self, uuids: Collection[GpuUuid], ill: Ill, take: Callable[[Probe], None]
    ) -> None:
        """Probe all of them at once, and pass each probe to `take` as it comes.

        A failed probe is held back until another GPU answers. If all fail alike, the session is
        renewed, unless it was renewed for that before, and they are probed once more.
        """
        held = await self._round(uuids, take)
        if fail_alike(held, ill) and await self._driver.renew():
            held = await self._round(uuids, take)
        for probe in of_the_driver(held, ill):
            take(probe)

    async def release(self, uuids: Collection[GpuUuid], *, everything: bool) -> str:
        """Let the driver release these GPUs, or all. Returns why it did not; empty: it did."""
        try:
            async with asyncio.timeout(RELEASE_DEADLINE):
                await self._driver.release(uuids, everything=everything)
        except (DriverError, GpuError) as error:
            return cap(str(error))
        except TimeoutError:
            return f"the driver has not released it within {RELEASE_DEADLINE:g} s"
        return ""

    def take_back(self, uuid: GpuUuid) -> None:
        """Let the driver use the GPU again."""
        self._driver.take_back(uuid)

    async def _round(
        self, uuids: Collection[GpuUuid], take: Callable[[Probe], None]
    ) -> tuple[Probe, ...]:
        """Probe all once. Returns the probes that were held back, because every GPU failed.

        The driver may fail during the round. So a GPU that answered before another one failed is
        probed once more, and only the second answer counts for the driver.
        """
        held: list[Probe] = []
        well: list[GpuUuid] = []

        async def ask(uuid: GpuUuid, *, again: bool = False) -> None:
            probe = await self.one(uuid)
            if has_failed(probe):
                held.append(probe)
                if well:
                    await ask(well.pop(), again=True)
                return
            well.append(uuid)
            while held:
                take(held.pop(0))
            if not again:
                take(probe)

        async with asyncio.TaskGroup() as tasks:
            for uuid in uuids:
                tasks.create_task(ask(uuid))
        return tuple(held)


# Collects reports that are judged together, because one failure causes many.

MOST_STRANGE: Final = 1024
"""When this many reports wait, reports of unknown GPUs are dropped."""

_Sort = tuple[EventKind, GpuUuid | None, XidClass | None]
"""Of the events that wait with the same sort, only the first is judged."""


class Gathering:
    """Holds events for `gather` seconds and probes for `coalesce` seconds, then returns them.

    It keeps the first event of each sort. So the number of events is bounded by the number of GPUs,
    and a storm does not displace a more severe event.
    """

    def __init__(self, settings: HealthSettings, knows: Callable[[GpuUuid], bool]) -> None:
        self._settings = settings
        self._knows = knows
        self._waiting: dict[Probe | _Sort, DriverEvent | Probe] = {}
        self._reported = asyncio.Event()
        self._urgent = asyncio.Event()

    def note(self, report: DriverEvent | Probe) -> None:
        """Add a report to the next batch. XIDs of the class APPLICATION are ignored."""
        sort = report if isinstance(report, Probe) else self._sort(report)
        if isinstance(sort, tuple) and sort[-1] is XidClass.APPLICATION:
            return
        if sort not in self._waiting and not self._has_room(report.uuid):
            return
        self._waiting.setdefault(sort, report)
        if isinstance(report, DriverEvent):
            self._urgent.set()
        self._reported.set()

    async def next(self) -> tuple[DriverEvent | Probe, ...]:
        """Wait for reports, then for those that belong to the same verdict; return all."""
        await self._reported.wait()
        if not self._urgent.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.coalesce):
                    await self._urgent.wait()
        await asyncio.sleep(self._settings.gather)
        self._reported.clear()
        self._urgent.clear()
        reports, self._waiting = tuple(self._waiting.values()), {}
        return reports

    def _sort(self, event: DriverEvent) -> _Sort:
        if event.kind is not EventKind.XID:
            return event.kind, event.uuid, None
        return event.kind, event.uuid, xid_class(event.xid or 0, self._settings)

    def _has_room(self, uuid: GpuUuid | None) -> bool:
        return len(self._waiting) < MOST_STRANGE or uuid is None or self._knows(uuid)


# Keeps the driver's stream of events open, and knows whether the agent receives events.

SETTLED: Final = 5.0
"""Seconds that a stream must be open without an error before the agent relies on it."""

OPENING: Final = 15.0
"""Seconds for the first stream to open, before GPUs count as unmonitored."""

FIRST_RETRY: Final = 0.5
LAST_RETRY: Final = 30.0

log = structlog.get_logger(__name__)


class Hearing:
    """Passes events to `take`. Calls `lost` whenever a stream has ended."""

    def __init__(
        self, driver: Driver, take: Callable[[DriverEvent], None], lost: Callable[[], None]
    ) -> None:
        self._driver = driver
        self._take = take
        self._lost = lost
        self._begun_at = _loop_time()
        self._opened_at: float | None = None
        self._deaf = ""
        self._wanted = asyncio.Event()
        self._opened = asyncio.Event()

    async def run(self) -> None:
        """Receive events for ever, and open the stream again when it ends."""
        self._begun_at, self._opened_at = _loop_time(), None
        delay = FIRST_RETRY
        while True:
            reason = "the stream of events ended"
            try:
                async for event in self._driver.events(self._note_open):
                    self._take(event)
                    delay = FIRST_RETRY
            except DriverError as error:
                reason = str(error)
            if self._has_settled():
                delay = FIRST_RETRY
            self._opened_at = None
            self._opened.clear()
            self._wanted.clear()
            self._note_deaf(reason or "no reason given")
            self._lost()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wanted.wait()
            delay = FIRST_RETRY if self._wanted.is_set() else min(2 * delay, LAST_RETRY)

    def reopen(self) -> None:
        """Open the stream at once: what had ended it may be over."""
        self._wanted.set()

    async def heard(self, within: float) -> bool:
        """Reopen the stream if it has ended, and wait for it. Returns whether it had."""
        if self._opened.is_set():
            return False
        self.reopen()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._opened.wait()
                self._note_heard()
        return True

    def obstacle(self) -> str:
        """Why the agent does not receive events; empty if it does.

        During the first OPENING seconds a stream that is not open yet is no obstacle.
        """
        if self._has_settled():
            self._note_heard()
        began = _loop_time() - self._begun_at
        if not self._deaf and self._opened_at is None and began >= OPENING:
            self._note_deaf("the stream of events does not open")
        return self._deaf

    def _has_settled(self) -> bool:
        return self._opened_at is not None and _loop_time() - self._opened_at >= SETTLED

    def _note_open(self) -> None:
        self._opened_at = _loop_time()
        self._opened.set()

    def _note_heard(self) -> None:
        if self._deaf:
            self._deaf = ""
            log.info("driver.events_back")

    def _note_deaf(self, reason: str) -> None:
        if not self._deaf:
            log.warning("driver.events_lost", err=reason)
        self._deaf = reason


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


# Turns driver events and probes into verdicts.

TICK: Final = 0.001
"""Seconds. The shortest wait for the next deadline, because timers can fire a little early."""

SECOND_LOOK: Final = 5.0
"""Seconds from a failed probe to the next one, which decides. It is more than SAME_HICCUP."""

MOST_KNOWN: Final = 256
"""The most GPUs outside the inventory whose health is kept."""

LISTEN_FIRST: Final = 1.0
"""Seconds for the stream of events to open before a GPU is served again without it."""

LOG_PERIOD: Final = 1.0
"""Seconds between lines about XIDs."""


class HealthWatch:
    """Watches the GPUs of the inventory.

    - It publishes the recalled health at construction, so a scan never marks an unhealthy GPU
      healthy.
    - It gives one verdict per GPU and batch. It holds back changes for `coalesce` seconds after a
      new list.
    - It probes all GPUs at once after an event and when a GPU comes or goes, and SECOND_LOOK
      seconds after a failed probe.
    - It judges by wall time at construction plus loop time, so a step of the clock does not change
      the length of a cool-down.
    - `judged` receives the health that changed, `remember` all health. `changed` is called when
      GPUs may have come or gone.
    """

    def __init__(
        self,
        *,
        driver: Driver,
        inventory: Cell[Inventory],
        judged: Callable[[Mapping[GpuUuid, Health]], None],
        remember: Callable[[Mapping[GpuUuid, Health]], None],
        changed: Callable[[], None],
        settings: HealthSettings,
        clock: Clock,
        recalled: Mapping[GpuUuid, Health],
        boot_changed: bool,
    ) -> None:
        self.xid_events = Tally(
            "xid_events_total", "XIDs that the driver reported.", ("gpu", "xid")
        )
        self.transitions = Tally(
            "health_transitions_total", "Changes of GPUs' conditions.", ("gpu", "from", "to")
        )
        self._inventory = inventory
        self._hand_on = judged
        self._remember = remember
        self._changed = changed
        self._settings = settings
        self._origin = clock.now() - dt.timedelta(seconds=_loop_time())
        self._health = {
            uuid: remembered(health, self._now(), settings, boot_changed=boot_changed)
            for uuid, health in recalled.items()
        }
        self._gathering = Gathering(settings, self._is_known)
        self._hearing = Hearing(driver, self._note_event, self._note_silence)
        self._asking = Asking(driver, settings.probe_deadline, self._hearing.obstacle)
        self._error_counts: dict[GpuUuid, ErrorCount] = {}
        self._look = asyncio.Event()
        self._moved = asyncio.Event()
        self._xid_lines = Throttle(LOG_PERIOD)
        if self._health and boot_changed:
            remember(dict(self._health))  # otherwise the next start would not see the boot
        if settings.switches.off:
            self._health = dict.fromkeys(self._health, switched_off(self._now()))
        if self._health:
            judged(dict(self._health))

    async def run(self) -> None:
        """Listen, probe and judge for ever. If health checks are off, only publish that."""
        if self._settings.switches.off:
            await self._stay_off()
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hearing.run())
            tasks.create_task(self._judge_reports())
            tasks.create_task(self._probe_rounds())
            tasks.create_task(self._watch_inventory())
            tasks.create_task(self._watch_silence())

    async def recheck(self, name: str, *, was_reset: bool = False) -> Recheck | None:
        """Probe the GPU with that index or UUID now, and judge the probe; None: no such GPU.

        `was_reset`: an operator reports that it was reset since its last report.
        """
        named = self._named(name)
        if not named:
            return None
        (shared,) = named
        uuid, before = shared.uuid, self._of(shared.uuid)
        if before.cause == Cause.RELEASED:
            self._asking.take_back(uuid)
            off = self._settings.switches.off
            back = switched_off(self._now()) if off else taken_back(before, self._now())
            self._publish({uuid: back})
            self._changed()
        if was_reset:
            self._publish({uuid: reset_by_word(self._of(uuid), self._now())})
        probe = await self._asking.surely(uuid, self._asked(), self._is_ill)
        if not self._settings.switches.off:
            if await self._hearing.heard(LISTEN_FIRST):
                probe = await self._asking.surely(uuid, self._asked(), self._is_ill)
            self._publish(self._judged((probe,)))
        after, inventory = self._of(uuid), self._inventory.value
        shared = msgspec.structs.replace(inventory.find(uuid) or shared, health=after)
        lacks = (*missing(after, self._now(), self._settings), *inventory.obstacles(shared))
        return Recheck(shared.gpu, probe, before, after, inventory.offers(shared), lacks)

    async def release(self, name: str) -> GpuRelease | None:
        """Release the GPU with that index or UUID, or `all`, also unshared ones; None: no such GPU.

        From then on no new container gets it, and it is not probed until a recheck.
        """
        gpus = self._inventory.value.gpus
        selected = gpus if name == ALL else self._named(name)
        uuids = tuple(gpu.uuid for gpu in selected)
        if not uuids:
            return None
        self._publish({uuid: released(self._of(uuid), self._now()) for uuid in uuids})
        obstacle = await self._asking.release(uuids, everything=name == ALL)
        self._hearing.reopen()  # the others' events were lost with the session
        return GpuRelease(uuids, obstacle=obstacle)

    def scanned(self, scan: Scan) -> None:
        """Take in a scan: a GPU that needs a reset and is not listed counts as lost.

        When it is listed again, it was away, which implies a reset. A scan with faults is ignored,
        because it does not show for certain which GPU is missing.
        """
        if any(fault.trouble is not Trouble.UNLISTED for fault in scan.faults):
            return
        listed = {gpu.uuid for gpu in scan.gpus}
        for uuid, health in self._health.items():
            if health.needs_reset and uuid not in listed:
                text = "the driver no longer lists it"
                self._gathering.note(Probe(uuid, ProbeOutcome.LOST, text))

    async def _stay_off(self) -> None:
        """Publish every GPU as served and unmonitored."""
        async for inventory in self._inventory.follow():
            fresh = {gpu.uuid for gpu in inventory.gpus} - self._health.keys()
            if fresh:
                off = dict.fromkeys(fresh, switched_off(self._now()))
                self._health.update(off)
                self._hand_on(off)

    # Incoming reports.

    def _note_event(self, event: DriverEvent) -> None:
        if event.kind is EventKind.CHANGED:
            self._changed()
            self._look.set()
            return
        if event.kind is EventKind.XID:
            self._count_xid(event)
        self._gathering.note(event)

    def _note_silence(self) -> None:
        """The stream of events has ended: scan and probe for what it may have missed."""
        self._changed()
        self._look.set()

    def _count_xid(self, event: DriverEvent) -> None:
        """Count every XID. Log the first of each number on a GPU, of others at most one a second.

        A storm can have 10,000.
        """
        gpu = event.uuid if event.uuid and self._is_known(event.uuid) else "unknown"
        is_first = self.xid_events.add(gpu, xid_label(event.xid or 0)) == 1
        left_out = 0 if is_first else self._xid_lines.admit()
        if left_out is not None:
            name = xid_name(event.xid or 0)
            log.info("gpu.xid", gpu=event.uuid, xid=event.xid, name=name, suppressed=left_out)

    async def _watch_inventory(self) -> None:
        """Probe at once when a GPU comes, goes or is found lost by a scan."""
        seen: frozenset[GpuUuid] | None = None
        async for inventory in self._inventory.follow():
            here = frozenset(gpu.uuid for gpu in inventory.gpus if gpu.present)
            if seen is not None and here != seen:
                self._look.set()
            seen = here

    async def _probe_rounds(self) -> None:
        """Probe all GPUs at each tick of `probe_interval`, soon after a failed probe, on demand."""
        while True:
            self._look.clear()
            failed = await self._round()
            pause = until_tick(self._settings.probe_interval)
            if failed:
                pause = min(self._settings.probe_interval, SECOND_LOOK)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._look.wait()

    async def _round(self) -> bool:
        """Probe all, and note the probes that change a health. Returns whether a probe failed."""
        doubts: list[Probe] = []

        def take(probe: Probe) -> None:
            known = self._of(probe.uuid)
            if judge(known, probe, self._now(), self._settings) != known:
                self._gathering.note(probe)
            self._compare(probe, known)
            failed = probe.outcome in {ProbeOutcome.FAILED, ProbeOutcome.REFUSED}
            fell_silent = probe.outcome is ProbeOutcome.SILENT and not known.silent
            if not known.ill and (failed or fell_silent):
                doubts.append(probe)

        await self._asking.all(self._asked(), self._is_ill, take)
        return bool(doubts)

    def _is_ill(self, uuid: GpuUuid) -> bool:
        return self._of(uuid).ill

    def _compare(self, probe: Probe, known: Health) -> None:
        """Attribute a memory error that the driver reported without a GPU, if the probe allows."""
        count = self._error_counts.get(probe.uuid, NOT_COUNTED)
        near = 2 * self._settings.probe_interval
        count, error = compared(count, probe, known, self._now(), near)
        self._error_counts[probe.uuid] = count
        if error is not None:
            self._gathering.note(error)

    # Outgoing verdicts.

    async def _judge_reports(self) -> None:
        while True:
            reports = await self._gathering.next()
            verdicts = self._judged(reports)
            moves = [
                new.serving for u, new in verdicts.items() if new.serving != self._of(u).serving
            ]
            if any(moves) and await self._hearing.heard(LISTEN_FIRST):
                self._look.set()  # the probes were made while no event was heard
            if self._publish(verdicts) and any(isinstance(each, DriverEvent) for each in reports):
                self._look.set()  # an event came first, so no GPU was probed yet
            if moves:
                await asyncio.sleep(self._settings.coalesce)

    def _judged(self, reports: Iterable[DriverEvent | Probe]) -> dict[GpuUuid, Health]:
        now = self._now()
        verdicts: dict[GpuUuid, Health] = {}
        for report in reports:
            for uuid in (report.uuid,) if report.uuid is not None else self._known():
                health = verdicts.get(uuid) or self._of(uuid)
                fresh = judge(health, report, now, self._settings)
                if fresh is not health and self._has_room(uuid, verdicts):
                    verdicts[uuid] = fresh
        return verdicts

    def _has_room(self, uuid: GpuUuid, verdicts: Mapping[GpuUuid, Health]) -> bool:
        """Whether to keep the health of that GPU. It bounds memory if a driver invents UUIDs."""
        return self._is_known(uuid) or len(self._health) + len(verdicts) < MOST_KNOWN

    def _is_known(self, uuid: GpuUuid) -> bool:
        return uuid in self._health or self._inventory.value.find(uuid) is not None

    async def _watch_silence(self) -> None:
        """Stop serving a silent GPU exactly when `driver_hang` has passed."""
        while True:
            self._moved.clear()
            now = self._now()
            self._publish({u: aged(old, now, self._settings) for u, old in self._health.items()})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_age()):
                    await self._moved.wait()

    def _next_age(self) -> float | None:
        """The loop time at which the next silent GPU is no longer served."""
        hang = dt.timedelta(seconds=self._settings.driver_hang)
        ends = [
            (health.since + hang - self._origin).total_seconds()
            for health in self._health.values()
            if health.silent and health.serving
        ]
        return max(min(ends), _loop_time() + TICK) if ends else None

    def _publish(self, verdicts: Mapping[GpuUuid, Health]) -> bool:
        """Publish what changed, all at once. Returns whether a condition changed."""
        changed = {u: health for u, health in verdicts.items() if health != self._of(u)}
        if not changed:
            return False
        moved = [self._tell(uuid, self._of(uuid), health) for uuid, health in changed.items()]
        self._health.update(changed)
        self._moved.set()
        self._hand_on(changed)
        self._remember(dict(self._health))
        return any(moved)

    def _tell(self, uuid: GpuUuid, old: Health, new: Health) -> bool:
        if as_told(old) == as_told(new):
            return False
        self.transitions.add(uuid, old.condition.value, new.condition.value)
        if Condition.LOST in {old.condition, new.condition} or old.silent:
            self._changed()  # it may be gone, or be back with other facts
        log.info(
            "gpu.health",
            gpu=uuid,
            was=old.condition.value,
            condition=new.condition.value,
            serving=new.serving,
            cause=new.cause,
            action=new.action,
            runbook=new.runbook,
            text=new.text,
        )
        return True

    def _named(self, name: str) -> tuple[SharedGpu, ...]:
        """The GPU with that index or UUID. If a lost and a present GPU match, the present one."""
        gpus = self._inventory.value.gpus
        named = [gpu for gpu in gpus if name in {gpu.uuid, gpu.gpu.label}]
        return (max(named, key=lambda gpu: gpu.present),) if named else ()

    def _asked(self) -> tuple[GpuUuid, ...]:
        return tuple(uuid for uuid in self._known() if self._of(uuid).cause != Cause.RELEASED)

    def _known(self) -> tuple[GpuUuid, ...]:
        return tuple(gpu.uuid for gpu in self._inventory.value.gpus)

    def _of(self, uuid: GpuUuid) -> Health:
        if uuid in self._health:
            return self._health[uuid]
        shared = self._inventory.value.find(uuid)
        return shared.health if shared else Health(Condition.OK, since=self._now())

    def _now(self) -> dt.datetime:
        return self._origin + dt.timedelta(seconds=_loop_time())
