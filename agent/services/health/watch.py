"""Driver events and probes become verdicts; what they mean is decided in agent.core.health."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import structlog

from agent.core.health.judge import aged, judge, missing, switched_off
from agent.core.health.maintenance import ALL, GpuRelease, Recheck, released, taken_back
from agent.core.health.memory import remembered
from agent.core.health.reports import DriverEvent, EventKind, Probe, ProbeOutcome
from agent.core.health.settings import HealthSettings
from agent.core.health.verdicts import as_told, reset_by_word
from agent.core.health.whose import NOT_COUNTED, ErrorCount, compared
from agent.core.health.xids import xid_label, xid_name
from agent.core.inventory.condition import Cause, Condition, Health
from agent.core.inventory.gpu import GpuUuid, Scan
from agent.core.inventory.inventory import Inventory, SharedGpu
from agent.core.ports import Clock, Driver
from agent.kit.cell import Cell
from agent.kit.tally import Tally
from agent.kit.throttle import Throttle
from agent.services.health.asking import Asking
from agent.services.health.gathering import Gathering
from agent.services.health.hearing import Hearing

TICK: Final = 0.001
"""A timer may come a little before its time: wait at least so long for the next one."""

SECOND_LOOK: Final = 5.0
"""Seconds after a doubtful probe until the next one, which decides. A hiccup is over by then."""

MOST_KNOWN: Final = 256
"""GPUs of whose health something is known, beyond those of the inventory."""

LOG_PERIOD: Final = 1.0
"""Seconds between lines about XIDs."""

log = structlog.get_logger(__name__)


class HealthWatch:
    """Watches the GPUs of the inventory.

    What was recalled is published at construction, so that no scan ever shows an ill GPU as well.
    One verdict per GPU and batch; what follows a new list within `coalesce` seconds is the next
    list. After an event, and when a GPU comes or goes, all are asked at once; after a probe that
    failed, SECOND_LOOK later. Judging time is steady: wall time at construction plus the loop's, so
    that a stepped clock neither ends nor stretches a quiet time. `judged` and `remember` take what
    differs and all that is known; `changed`: GPUs may have come or gone.
    """

    def __init__(  # noqa: PLR0913 -- the parts that app joins, by keyword
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
        self.xid_events = Tally("xid_events_total", "XIDs that the driver told.", ("gpu", "xid"))
        moves = ("gpu", "from", "to")
        self.transitions = Tally("health_transitions_total", "Changes of GPUs' conditions.", moves)
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
            remember(dict(self._health))  # or the next start would not know of the boot
        if settings.switches.off:
            self._health = dict.fromkeys(self._health, switched_off(self._now()))
        if self._health:
            judged(dict(self._health))

    async def run(self) -> None:
        """Listen, probe and judge for ever; only say so where health checks are switched off."""
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
        """Ask the GPU with that index or UUID now, and judge the answer; None: no such GPU.

        `was_reset`: an operator says that it was reset since its last report.
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
            self._publish(self._judged((probe,)))
        after, inventory = self._of(uuid), self._inventory.value
        shared = dataclasses.replace(inventory.find(uuid) or shared, health=after)
        lacks = (*missing(after, self._now(), self._settings), *inventory.obstacles(shared))
        return Recheck(shared.gpu, probe, before, after, inventory.offers(shared), lacks)

    async def release(self, name: str) -> GpuRelease | None:
        """Let go of the GPU with that index or UUID, or of `all`, shared or not; None: none such.

        Nothing new is placed on it from then on; it is asked nothing until it is rechecked.
        """
        gpus = self._inventory.value.gpus
        found = gpus if name == ALL else self._named(name)
        uuids = tuple(gpu.uuid for gpu in found)
        if not uuids:
            return None
        self._publish({uuid: released(self._of(uuid), self._now()) for uuid in uuids})
        obstacle = await self._asking.release(uuids, everything=name == ALL)
        return GpuRelease(uuids, obstacle=obstacle)

    def scanned(self, scan: Scan) -> None:
        """The driver was asked: one that waits for a reset and is not listed is lost.

        When it is listed again it was away. A scan with faults does not tell for certain who is
        missing, and a driver that does not answer tells nothing of a GPU.
        """
        if scan.faults:
            return
        listed = {gpu.uuid for gpu in scan.gpus}
        for uuid, health in self._health.items():
            if health.needs_reset and uuid not in listed:
                text = "it is not listed any more"
                self._gathering.note(Probe(uuid, ProbeOutcome.LOST, text))

    async def _stay_off(self) -> None:
        """Every GPU is served, and shown as what it is: not looked after."""
        async for inventory in self._inventory.follow():
            fresh = {gpu.uuid for gpu in inventory.gpus} - self._health.keys()
            if fresh:
                told = dict.fromkeys(fresh, switched_off(self._now()))
                self._health.update(told)
                self._hand_on(told)

    # Reports come in.

    def _note_event(self, event: DriverEvent) -> None:
        if event.kind is EventKind.CHANGED:
            self._changed()
            self._look.set()
            return
        if event.kind is EventKind.XID:
            self._count_xid(event)
        self._gathering.note(event)

    def _note_silence(self) -> None:
        """The stream of events has ended: what happened meanwhile must be looked for."""
        self._changed()
        self._look.set()

    def _count_xid(self, event: DriverEvent) -> None:
        """Count each; tell of one a second, for a storm is 10,000 of them."""
        gpu = event.uuid if event.uuid and self._is_known(event.uuid) else "unknown"
        self.xid_events.add(gpu, xid_label(event.xid or 0))
        left_out = self._xid_lines.admit()
        if left_out is not None:
            name = xid_name(event.xid or 0)
            log.info("gpu.xid", gpu=event.uuid, xid=event.xid, name=name, suppressed=left_out)

    async def _watch_inventory(self) -> None:
        """A GPU that comes, goes or is found lost by a scan is asked at once."""
        seen: frozenset[GpuUuid] | None = None
        async for inventory in self._inventory.follow():
            here = frozenset(gpu.uuid for gpu in inventory.gpus if gpu.present)
            if seen is not None and here != seen:
                self._look.set()
            seen = here

    async def _probe_rounds(self) -> None:
        """Ask every GPU, rest, and so on; a wish to look ends the rest, a doubt makes it short."""
        while True:
            self._look.clear()
            rest = self._settings.probe_interval
            if await self._round():
                rest = min(rest, SECOND_LOOK)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await self._look.wait()

    async def _round(self) -> bool:
        """Ask all; note only what says something new. Whether one of them is in doubt now."""
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
        """The probe may tell whose a memory error was that the driver put down to nobody."""
        count = self._error_counts.get(probe.uuid, NOT_COUNTED)
        near = 2 * self._settings.probe_interval
        count, error = compared(count, probe, known, self._now(), near)
        self._error_counts[probe.uuid] = count
        if error is not None:
            self._gathering.note(error)

    # Verdicts go out.

    async def _judge_reports(self) -> None:
        while True:
            reports = await self._gathering.next()
            verdicts = self._judged(reports)
            is_listed = any(self._of(u).serving != one.serving for u, one in verdicts.items())
            if self._publish(verdicts) and any(isinstance(one, DriverEvent) for one in reports):
                self._look.set()  # the probes do not come from there: nobody was asked yet
            if is_listed:
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
        """Whether the health of that GPU is kept: a driver that invents UUIDs fills nothing."""
        return self._is_known(uuid) or len(self._health) + len(verdicts) < MOST_KNOWN

    def _is_known(self, uuid: GpuUuid) -> bool:
        return uuid in self._health or self._inventory.value.find(uuid) is not None

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
            if health.silent and health.serving
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
        self._hand_on(changed)
        self._remember(dict(self._health))
        return any(moved)

    def _tell(self, uuid: GpuUuid, old: Health, new: Health) -> bool:
        if as_told(old) == as_told(new):
            return False
        self.transitions.add(uuid, old.condition.value, new.condition.value)
        if Condition.LOST in {old.condition, new.condition} or old.silent:
            self._changed()  # it may be gone for good, or come back as something else
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
        """The GPU of that index or UUID. Of a lost one and one at its index now: the present."""
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


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
