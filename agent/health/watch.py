"""Listens to events, probes the GPUs and gives the verdicts."""

import asyncio
import datetime as dt
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import replace

from agent.errors import DriverError, GpuError, cap
from agent.health import judge
from agent.kit.cell import Cell
from agent.kit.timing import Lag, Tally, await_event, loop_time, until_tick
from agent.model import (
    Cause,
    Condition,
    DriverEvent,
    EventKind,
    Gpu,
    GpuUuid,
    Health,
    Inventory,
    Probe,
    ProbeOutcome,
    RecoveryAction,
    Scan,
    SharedGpu,
    Trouble,
)
from agent.ports import Clock, Driver

log = structlog.get_logger(__name__)

# Keeps the driver's stream of events open, and knows whether the agent receives events.

# Seconds that a stream must be open without an error before the agent relies on it. The next one
# may take as long to open before the GPUs count as unmonitored.
SETTLED: Final = 5.0
FIRST_RETRY: Final = 0.5
LAST_RETRY: Final = 30.0
LISTEN_FIRST: Final = 1.0  # for a stream to open before a GPU is served without it, and told so
NOT_OPEN: Final = "the stream of events has not opened"


class EventListener:
    """Passes events to `take`, and CHANGED whenever a stream has ended: it may have missed some."""

    def __init__(self, driver: Driver, take: Callable[[DriverEvent], None]) -> None:
        self._driver = driver
        self._take = take
        self._lost_reason = ""
        self._turned_at = math.inf  # when the last stream opened or ended
        self.wanted = asyncio.Event()  # set it to open the stream at once: its obstacle may be over
        self._opened = asyncio.Event()

    async def run(self) -> None:
        """Receive events for ever, and open the stream again when it ends."""
        delay = FIRST_RETRY
        while True:
            self._opened.clear()  # also what a former run has left set
            self.wanted.clear()
            reason = "the stream of events ended"
            try:
                async for event in self._driver.events(self._note_open):
                    self._take(event)
            except DriverError as error:
                reason = str(error)

            # A GPU that is lost fails the stream of all, once. A stream that held for a while did
            # not fail at its opening: the next one is opened at once, and only if that fails, too,
            # the events are lost.
            has_held = self._opened.is_set() and loop_time() - self._turned_at >= SETTLED
            self._opened.clear()
            self._turned_at = loop_time()
            if not has_held:
                self._note(reason)

            # An XID that came in between is heard by nobody. The scan and the probes find a GPU
            # that is lost, refused or asks for a reset.
            self._take(DriverEvent(EventKind.CHANGED))
            is_wanted = await await_event(self.wanted, 0 if has_held else delay)
            delay = FIRST_RETRY if is_wanted or has_held else min(2 * delay, LAST_RETRY)

    async def ensure_open(self, within: float) -> bool:
        """Reopen the stream if it has ended, and wait for it. Returns whether it had."""
        if self._opened.is_set():
            return False
        self.wanted.set()
        is_open = await await_event(self._opened, within)
        self._note("" if is_open else self._lost_reason or NOT_OPEN)
        return True

    def obstacle(self) -> str:
        """Why the agent does not receive events; empty: it does, or the first stream opens yet."""
        if loop_time() - self._turned_at >= SETTLED:
            # It holds; or the driver may hang at the opening of the next one.
            self._note("" if self._opened.is_set() else self._lost_reason or NOT_OPEN)
        return self._lost_reason

    def _note_open(self) -> None:
        self._turned_at = loop_time()
        self._opened.set()

    def _note(self, reason: str) -> None:
        if reason and not self._lost_reason:
            log.warning("driver.events_lost", err=reason)
        self._lost_reason = reason


# Turns driver events and probes into verdicts.

TURNS: Final = 2  # how many driver deadlines a probe may take: a call ahead of it, and its own call
RELEASE_DEADLINE: Final = 8.0  # for the longest call in the library and those that wait behind it
TICK: Final = 0.001  # timers can fire a little early
SECOND_LOOK: Final = 5.0  # from a failed probe to the next, which decides; more than SAME_HICCUP
LOOK_PERIOD: Final = 0.5  # seconds between rounds of probes because of XIDs
ALL = "all"  # stands for all GPUs of the node, in place of one GPU's name


class GpuRelease(Struct, frozen=True):
    """The released GPUs. `obstacle`: why the agent still holds them open; empty: it does not."""

    gpus: tuple[GpuUuid, ...]
    obstacle: str = ""


class Recheck(Struct, frozen=True):
    """The result of probing one GPU now. `missing`: what still has to happen until it is ok."""

    gpu: Gpu
    probe: Probe
    before: Health
    after: Health
    serving: bool
    missing: tuple[str, ...] = ()


class HealthWatch:
    """Watches the GPUs of the inventory.

    - It publishes the recalled health at construction: no scan marks an unhealthy GPU healthy.
    - It gives one verdict per GPU and batch, and none for `coalesce` seconds after a new list.
    - It probes all GPUs at once after an event and when a GPU comes or goes, and SECOND_LOOK
      seconds after a failed probe.
    - It judges by wall time at construction plus loop time: no step of the clock changes the length
      of a cool-down.
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
        settings: judge.HealthSettings,
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
        self._driver = driver
        self._inventory = inventory
        self._on_judged = judged
        self._remember = remember
        self._changed = changed
        self._settings = settings
        self._origin = clock.now() - dt.timedelta(seconds=loop_time())
        self._health = {
            uuid: judge.remembered(health, self._now(), settings, boot_changed=boot_changed)
            for uuid, health in recalled.items()
        }
        self._listener = EventListener(driver, self._note_event)
        self._waiting: dict[DriverEvent | Probe, None] = {}  # the reports that are judged next
        self._reported = asyncio.Event()
        self._probe_now = asyncio.Event()
        self._probed_at = loop_time()
        self._listed: set[GpuUuid] = set()  # the GPUs of the last scan
        if self._health and boot_changed:
            remember(dict(self._health))  # otherwise the next start would not see the boot

        if settings.off:
            self._health = dict.fromkeys(self._health, judge.switched_off(self._now()))

        if self._health:
            judged(dict(self._health))

    async def run(self) -> None:
        """Listen, probe and judge for ever; if health checks are off, do nothing for ever."""
        if self._settings.off:
            await asyncio.Event().wait()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listener.run())
            tasks.create_task(self._judge_reports())
            tasks.create_task(self._probe_rounds())

    async def recheck(self, name: str, *, was_reset: bool = False) -> Recheck | None:
        """Probe the GPU with that index or UUID now, and judge the probe; None: no such GPU.

        `was_reset`: an operator reports that it was reset since its last report.
        """
        shared = self._named(name)
        if shared is None:
            return None

        uuid, is_off, now = shared.uuid, self._settings.off, self._now()
        before = back = self._health_of(uuid)
        if before.cause == Cause.RELEASED:
            # Whoever released the GPU gives it back by this. Its handles open before the probe.
            self._driver.take_back(uuid)
            back = judge.taken_back(before, now, self._settings)
            self._health[uuid] = back = judge.switched_off(now) if is_off else back
            self._changed()

        if not is_off:
            await self._listener.ensure_open(LISTEN_FIRST)  # else the GPU is served without events

        probe = await self._probe(uuid)
        if judge.has_failed(probe):  # the driver may be at fault, which the others' probes show
            probe = (await self._probe_all(lambda _: None)).get(uuid, probe)
        if was_reset and probe.signs.recovery not in judge.WANTS:
            # NVML tells nobody of a reset, and an XID before it would count for ever.
            probe = replace(probe, signs=replace(probe.signs, recovery=RecoveryAction.NONE))

        known = self._judged(() if is_off else (probe,)).get(uuid) or self._health_of(uuid)
        if self._health_of(uuid) is back:  # people are told only what the answer makes of it
            self._health[uuid] = before
        self._publish({uuid: known})

        after, inventory = self._health_of(uuid), self._inventory.value
        shared = replace(inventory.find(uuid) or shared, health=after)
        lacks = judge.missing(after, self._now(), self._settings) + inventory.obstacles(shared)
        return Recheck(shared.gpu, probe, before, after, inventory.offers(shared), lacks)

    async def release(self, name: str) -> GpuRelease | None:
        """Release the GPU with that index or UUID, or `all`, also unshared ones; None: no such GPU.

        From then on no new container gets it, and it is not probed until a recheck.
        """
        selected = self._inventory.value.gpus if name == ALL else (self._named(name),)
        uuids = tuple(gpu.uuid for gpu in selected if gpu is not None)
        if not uuids:
            return None

        now, obstacle = self._now(), ""
        self._publish({uuid: judge.released(self._health_of(uuid), now) for uuid in uuids})
        try:
            async with asyncio.timeout(RELEASE_DEADLINE):
                await self._driver.release(uuids, everything=name == ALL)
        except (TimeoutError, DriverError, GpuError) as error:
            # It counts as released all the same: no new container gets it.
            obstacle = cap(str(error)) or "a call has not returned from the driver"

        self._listener.wanted.set()  # the others' events were lost with the session
        return GpuRelease(uuids, obstacle=obstacle)

    def scanned(self, scan: Scan) -> None:
        """Take in a scan: if GPUs have come or gone, all are probed.

        A GPU that needs a reset and is not listed counts as lost: when it is back, it was reset. A
        scan with faults shows for certain no GPU that is missing.
        """
        listed = {gpu.uuid for gpu in scan.gpus}
        if listed != self._listed:
            self._listed = listed
            self._probe_now.set()
        if self._settings.off:
            # Not remembered: health from before the checks were switched off is kept.
            fresh = set(self._uuids()) - self._health.keys()
            off = dict.fromkeys(fresh, judge.switched_off(self._now()))
            self._health.update(off)
            self._on_judged(off)

        if any(fault.trouble is not Trouble.UNLISTED for fault in scan.faults):
            return

        for uuid, health in self._health.items():
            if health.needs_reset and uuid not in listed:
                self._note(Probe(uuid, ProbeOutcome.LOST, "the driver no longer lists it"))

    # Incoming reports.

    def _note_event(self, event: DriverEvent) -> None:
        if event.kind is EventKind.CHANGED:
            # A scan finds which GPUs there are now, a probe how they are.
            self._changed()
            self._probe_now.set()
            return

        if event.kind is EventKind.XID:
            # Every XID is counted, and the first of each number on a GPU is logged: a storm can
            # have 10,000 a second. The kernel's log has each.
            number = event.xid or 0
            label = str(number) if 0 < number < 256 else "other"
            if self.xid_events.add(event.uuid or "unknown", label) == 1:
                log.info("gpu.xid", gpu=event.uuid, xid=event.xid, name=judge.xid_name(number))
            if judge.xid_class(number, self._settings) is judge.XidClass.APPLICATION:
                return  # a program's fault says nothing about the GPU

        self._note(event)

    def _note(self, report: DriverEvent | Probe) -> None:
        """Add a report to the next batch, equal ones once: so a storm is a few events."""
        self._waiting[report] = None
        self._reported.set()

    # Probes.

    async def _probe_rounds(self) -> None:
        """Probe all GPUs at each tick of `probe_interval`, soon after a failed probe, on demand."""
        while True:
            self._probe_now.clear()
            self._probed_at = loop_time()
            probes = await self._probe_all(self._note_probe)
            pause = until_tick(self._settings.probe_interval)

            # A single failure decides nothing: the second look does, and must not be late.
            failed = (u for u, probe in probes.items() if probe.outcome is ProbeOutcome.FAILED)
            if not all(map(self._is_ill, failed)):
                pause = min(self._settings.probe_interval, SECOND_LOOK)

            await await_event(self._probe_now, pause)

    def _note_probe(self, probe: Probe) -> None:
        """Note a probe that changes a health: any other may be older than an event that waits."""
        if self._judged((probe,)):
            self._note(probe)

    async def _probe_all(self, note: Callable[[Probe], None]) -> dict[GpuUuid, Probe]:
        """Probe all GPUs at once, and pass each probe to `note`; a failed one after all others.

        If all fail alike, they are probed once more in a new session, unless one was tried before.
        """
        probes = await self._round(note)
        failure = judge.common_failure(probes.values(), self._is_ill)
        if failure is not None and await self._driver.renew():
            probes = await self._round(note)

        for probe in judge.blame_driver(tuple(probes.values()), self._is_ill):
            if judge.has_failed(probes[probe.uuid]):
                note(probe)
                probes[probe.uuid] = probe

        return probes

    async def _round(self, note: Callable[[Probe], None]) -> dict[GpuUuid, Probe]:
        """Probe all GPUs once. Those that have not failed go to `note` as they come."""
        probes: dict[GpuUuid, Probe] = {}

        async def ask(uuid: GpuUuid) -> None:
            probes[uuid] = probe = await self._probe(uuid)
            if not judge.has_failed(probe):
                note(probe)

        async with asyncio.TaskGroup() as tasks:
            for uuid in self._uuids():
                if self._health_of(uuid).cause != Cause.RELEASED:
                    tasks.create_task(ask(uuid))

        return probes

    async def _probe(self, uuid: GpuUuid) -> Probe:
        """Probe that GPU. If the driver fails or does not answer, the outcome is SILENT."""
        deadline = TURNS * self._settings.probe_deadline
        try:
            async with Lag().within(deadline):
                probe = await self._driver.probe(uuid)
        except (TimeoutError, DriverError, GpuError) as error:
            text = cap(str(error)) or f"no answer within {deadline:g} s"
            return Probe(uuid, ProbeOutcome.SILENT, text)
        obstacle = self._listener.obstacle() if probe.outcome is ProbeOutcome.PASSED else ""
        return replace(probe, unmonitored=obstacle or probe.unmonitored)

    # Outgoing verdicts.

    async def _judge_reports(self) -> None:
        while True:
            await self._reported.wait()
            await asyncio.sleep(self._settings.gather)  # one failure causes many reports
            self._reported.clear()
            reports, self._waiting = tuple(self._waiting), {}

            verdicts = self._judged(reports)
            served = {uuid: self._health_of(uuid).serving for uuid in verdicts}
            moves = {new.serving for u, new in verdicts.items() if new.serving != served[u]}
            # Only an offer waits for the stream. What ended it may be the GPU to be withdrawn.
            if True in moves and await self._listener.ensure_open(LISTEN_FIRST):
                self._probe_now.set()  # the probes were made while no event was heard
                verdicts = self._judged(reports)  # an operator may have released a GPU meanwhile

            self._publish(verdicts)
            if any(isinstance(report, DriverEvent) for report in reports):
                # Only a probe reads what the driver now asks for. A storm of XIDs causes one round
                # of probes in LOOK_PERIOD.
                soon = max(loop_time(), self._probed_at + LOOK_PERIOD)
                asyncio.get_running_loop().call_at(soon, self._probe_now.set)

            if moves:
                await asyncio.sleep(self._settings.coalesce)

    def _judged(self, reports: Iterable[DriverEvent | Probe]) -> dict[GpuUuid, Health]:
        now = self._now()
        verdicts: dict[GpuUuid, Health] = {}

        for report in reports:
            for uuid in (report.uuid,) if report.uuid is not None else self._uuids():
                health = verdicts.get(uuid) or self._health_of(uuid)
                fresh = judge.judge(health, report, now, self._settings)
                if fresh is not health:
                    verdicts[uuid] = fresh

        return verdicts

    def _publish(self, verdicts: Mapping[GpuUuid, Health]) -> None:
        """Publish what changed, all at once."""
        changed = {u: health for u, health in verdicts.items() if health != self._health_of(u)}
        for uuid, new in changed.items():
            old = self._health_of(uuid)
            if new.silent and new.serving and not old.silent:
                # From now on it is served for `driver_hang` and not longer.
                delay = self._settings.driver_hang + TICK
                asyncio.get_running_loop().call_later(delay, self._age)

            if (old.condition, old.serving, old.action) == (new.condition, new.serving, new.action):
                continue

            was, condition = old.condition.value, new.condition.value
            self.transitions.add(uuid, was, condition)
            if Condition.LOST in {old.condition, new.condition} or old.silent:
                self._changed()  # it may be gone, or be back with other facts

            # The text ends with the id, and says the cause and the action.
            told = {"condition": condition, "serving": new.serving, "text": new.text}
            log.info("gpu.health", gpu=uuid, was=was, **told)

        if changed:
            self._health.update(changed)
            self._on_judged(changed)
            self._remember(dict(self._health))

    def _age(self) -> None:
        now = self._now()
        self._publish({u: judge.aged(old, now, self._settings) for u, old in self._health.items()})

    def _named(self, name: str) -> SharedGpu | None:
        """The GPU with that index or UUID. If a lost and a present GPU match, the present one."""
        gpus = self._inventory.value.gpus
        named = (gpu for gpu in gpus if name in {gpu.uuid, gpu.gpu.label})
        return max(named, key=lambda gpu: gpu.present, default=None)

    def _uuids(self) -> tuple[GpuUuid, ...]:
        return tuple(gpu.uuid for gpu in self._inventory.value.gpus)

    def _is_ill(self, uuid: GpuUuid) -> bool:
        return self._health_of(uuid).ill

    def _health_of(self, uuid: GpuUuid) -> Health:
        if uuid in self._health:
            return self._health[uuid]
        shared = self._inventory.value.find(uuid)
        return shared.health if shared else Health(Condition.OK, since=self._now())

    def _now(self) -> dt.datetime:
        return self._origin + dt.timedelta(seconds=loop_time())
