"""Random histories of the driver: whatever it does, the kubelet is told the truth of each GPU.

Invariants: after a change each stream has the one newest list, in which the slices of a GPU agree
(I4); lists are sorted, without repeated ids and of bounded size (I5); nothing that the driver does
ends the agent (I8); what is known to be bad stays so over restarts of agent and kubelet until a
rule clears it, and no hiccup of the probes takes a well GPU away (I9). When all troubles end, every
GPU is served again.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from agent.app.agent import NodeAgent
from agent.errors import AgentError, DriverError, DriverMissing, GpuError, StateError
from agent.health.judge import HealthSettings
from agent.kubelet.door import PluginServer
from agent.model import (
    LIST_BYTES,
    Cause,
    Condition,
    DriverEvent,
    EventKind,
    GpuFault,
    GpuSigns,
    GpuUuid,
    Health,
    Probe,
    ProbeOutcome,
    RecoveryAction,
    Scan,
    Trouble,
)
from agent.state import recover
from agent.wire.v1beta1 import Empty, ListAndWatchResponse
from tests.app.front_node import PATHS, FrontPlaces, joined
from tests.builders import a_gpu, a_uuid
from tests.fakes.disk import MemoryDisk
from tests.fakes.driver import ScriptedDriver
from tests.machine.playing import OneHistory
from tests.machine.sides import VirtualLoop
from tests.services.at_work import at_work

GPUS = 3
UUIDS = tuple(a_uuid(n) for n in range(GPUS))
NO_ANSWER = DriverError("Unknown Error")


class AnyDriver(ScriptedDriver):
    """Nothing is queued for who listens later."""

    def __init__(self) -> None:
        super().__init__(a_gpu(index=n) for n in range(GPUS))
        self.troubles: dict[str, AgentError] = {}
        self.listeners = 0
        self.taken_out: set[GpuUuid] = set()

    def restart(self) -> None:
        """The process that used it is gone."""
        self._events = asyncio.Queue()
        self.listeners = 0

    @property
    def sound(self) -> bool:
        """Whether scans and probes are answered."""
        return not self.hung and not self.troubles.keys() & {"scan", "probe"}

    def told_of(self, uuid: GpuUuid) -> GpuSigns:
        """What the GPU says of itself now."""
        return self.signs.get(uuid, GpuSigns())

    async def scan(self) -> Scan:
        self._fail("scan")
        lost = [u for u in UUIDS if self.outcomes.get(u) is ProbeOutcome.LOST]
        listed = [uuid for uuid in lost if uuid not in self.taken_out]
        self.faults = [GpuFault(uuid, "GPU is lost", Trouble.LOST) for uuid in listed]
        found = await super().scan()
        return msgspec.structs.replace(
            found, gpus=tuple(gpu for gpu in found.gpus if gpu.uuid not in lost)
        )

    async def probe(self, uuid: GpuUuid) -> Probe:
        self._fail("probe")
        if uuid in self.taken_out:
            raise GpuError(uuid, "Not Found")
        return await super().probe(uuid)

    async def events(self, opened: Callable[[], None] | None = None) -> AsyncIterator[DriverEvent]:
        self._fail("events")
        self._events = asyncio.Queue()  # the driver keeps nothing for who comes later
        self.listeners += 1
        try:
            async for event in super().events(opened):
                yield event
        finally:
            self.listeners -= 1

    def _fail(self, call: str) -> None:
        if call in self.troubles:
            raise self.troubles[call]


# One life of the agent's health, from a driver to the bytes of its lists.

OWN = f"health: {{probePeriod: 20}}\n{PATHS}"


class _LifeDisk(MemoryDisk):
    """The disk of one life: a dead one writes no more."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__()
        self.files, self.faults = disk.files, disk.faults
        self.is_dead = False

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        if self.is_dead:
            raise StateError("the process was killed")
        await asyncio.sleep(0.002)
        await super().replace(name, data, keep=keep)


class GpuStream:
    """One kubelet's stream of lists."""

    def __init__(self, plugin: PluginServer) -> None:
        self.frames: list[bytes] = []
        self.looked_at = 0
        """Frames that were looked at before."""
        self.task = asyncio.get_running_loop().create_task(self._read(plugin))

    async def _read(self, plugin: PluginServer) -> None:
        async for frame in plugin.list_and_watch(Empty()):
            self.frames.append(bytes(frame))


# A driver that may do anything, lives of the agent's health, and kubelets that listen.
#
# The lists are read as bytes from the real handler of ListAndWatch. What must be is kept here by
# rules of its own, which know nothing of how the agent judges.

HEALTH = HealthSettings(probe_interval=20.0)
NOTICED = 2 * HEALTH.probe_interval + 10.0
"""Seconds within which a lost or failing GPU is found, if the driver answers."""

MISSED = 70.0
"""Seconds within which a GPU that is listed no more is missed: scans come every minute."""


@dataclasses.dataclass
class Need:
    """Why a GPU may not be served: until `until`, or for ever.

    `cures` says what ends that; whatever was cured has to rest before it is served.
    """

    until: float
    cures: frozenset[str]


class GpuWorld:
    """Everything that takes part. Methods are what may happen; each returns at once."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.driver = AnyDriver()
        self.disk = MemoryDisk()
        self.needs: dict[GpuUuid, Need] = {}
        self.needed: dict[GpuUuid, Need] = {}
        """Those of the last look."""
        self.was_sound = True
        self.lost_since: dict[GpuUuid, float] = {}
        self.failing_since: dict[GpuUuid, float] = {}
        self.refusing: set[GpuUuid] = set()
        """They answer nothing until they are reset."""
        self.failed_at: dict[GpuUuid, float] = {}
        self.streams: list[GpuStream] = []
        self.boots = 0

    # What happens to the agent and to the kubelet.

    async def start_agent(self) -> None:
        self.driver.restart()
        self.life_disk, boot = _LifeDisk(self.disk), f"boot-{self.boots}"
        found = await recover(self.life_disk, boot_id=boot, machine_id="m")
        places = FrontPlaces(self.life_disk)
        self.front = joined(self.driver, found.state, boot, OWN, places)
        self.task = self.loop.create_task(self._live(self.front))
        self.streams = []
        await self.open_stream(stale=True)
        self.heard_since = self.sound_since = self.loop.time()

    async def _live(self, front: NodeAgent) -> None:
        services = front.withholder, front.discovery, front.health
        async with at_work(front.state.run, *(service.run for service in services)):
            await asyncio.Event().wait()

    async def kill_agent(self) -> None:
        self.life_disk.is_dead = True
        for task in (self.task, *(stream.task for stream in self.streams)):
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def restart_agent(self) -> None:
        await self.kill_agent()
        await self.start_agent()

    async def reboot(self) -> None:
        """Every GPU is reset; one that was off the bus comes back."""
        await self.kill_agent()
        self.boots += 1
        self.needs.clear()
        self.heal()
        await self.start_agent()

    async def open_stream(self, *, stale: bool) -> None:
        """The kubelet asks for lists; its older streams live on when they are `stale`."""
        kept = self.streams[-3:] if stale else []
        for old in self.streams:
            if old not in kept:
                old.task.cancel()
        self.streams = [*kept, GpuStream(self.front.server)]

    def known(self, uuid: GpuUuid) -> Health | None:
        """What the agent takes the GPU for."""
        return self.front.keeper._health.get(uuid)

    # What happens to the driver and its GPUs.

    def report(self, *events: DriverEvent) -> None:
        """The driver reports; nobody may listen."""
        if self.driver.listeners and not self.driver.hung:
            self.driver.report(*events)
            for event in events:
                self._expect(event)

    def _expect(self, event: DriverEvent) -> None:
        """XIDs by number, as people know them: 31 is a program's, 48 needs a reset."""
        if event.uuid not in UUIDS:
            return  # who names no GPU, or a stranger, takes none out
        if event.kind is EventKind.ECC_DOUBLE or event.xid in {48, 64, 79, 95, 119, 140}:
            known = self.driver.told_of(event.uuid).recovery
            until = self._rested() if known is RecoveryAction.NONE else float("inf")
            self._must_not_serve(event.uuid, Need(until, frozenset({"reset"})))
        elif event.xid == 151:
            self._must_not_serve(event.uuid, Need(float("inf"), frozenset()))
        elif event.xid in {1, 54, 54321}:
            self._must_not_serve(event.uuid, Need(self._rested(), frozenset({"rest"})))

    def _must_not_serve(self, uuid: GpuUuid, need: Need) -> None:
        known = self.needs.get(uuid)
        if known is None or known.until < need.until or not need.cures:
            self.needs[uuid] = need

    def _rested(self) -> float:
        return self.loop.time() + HEALTH.quiet - 1.0

    def answer(self, uuid: GpuUuid, outcome: ProbeOutcome) -> None:
        """Probes of the GPU end like this from now on."""
        is_refused = outcome is ProbeOutcome.FAILED and uuid in self.refusing
        self.driver.outcomes[uuid] = ProbeOutcome.REFUSED if is_refused else outcome
        if outcome is ProbeOutcome.PASSED and uuid in self.refusing:
            self.refusing.discard(uuid)
            self._cured(uuid, "reset")
        if outcome is ProbeOutcome.FAILED:
            self.failing_since.setdefault(uuid, self.loop.time())
        elif self.failing_since.pop(uuid, None) is not None:
            self.failed_at[uuid] = self.loop.time()

    def refuse(self, uuid: GpuUuid) -> None:
        """The driver answers for it again when it was reset, and not before."""
        self.refusing.add(uuid)
        self.answer(uuid, ProbeOutcome.FAILED)

    def lose(self, uuid: GpuUuid) -> None:
        self.answer(uuid, ProbeOutcome.LOST)
        self.lost_since.setdefault(uuid, self.loop.time())

    def take_out(self, uuid: GpuUuid) -> None:
        """It is lost, and the driver does not know it any more: only a scan shows that."""
        self.driver.taken_out.add(uuid)
        self.lose(uuid)
        self.lost_since[uuid] = self.loop.time() + MISSED

    def restore(self, uuid: GpuUuid) -> None:
        """It comes back reset. Who saw that it was away may trust it after a rest."""
        self.driver.taken_out.discard(uuid)
        self.answer(uuid, ProbeOutcome.PASSED)
        if self.lost_since.pop(uuid, None) is not None:
            self._cured(uuid, "reset")

    def say(self, uuid: GpuUuid, signs: GpuSigns) -> None:
        """The GPU tells this of itself from now on."""
        self.driver.signs[uuid] = signs
        if signs.recovery is RecoveryAction.NONE:
            self._cured(uuid, "reset")

    def _cured(self, uuid: GpuUuid, cure: str) -> None:
        """It may be served again after a rest, which nobody can have begun before."""
        need = self.needs.get(uuid)
        if need is not None and cure in need.cures and need.until == float("inf"):
            self.needs[uuid] = Need(self._rested(), need.cures)

    def heal(self) -> None:
        """All troubles end."""
        self.driver.hung = False
        self.driver.troubles.clear()
        for uuid in UUIDS:
            self.restore(uuid)
        self.driver.signs.clear()
        self.driver.unmonitored.clear()

    # What must be.

    def breaches(self) -> Iterator[str]:
        """What is wrong now, by invariant."""
        if self.task.done():
            yield f"I8: the agent ended: {self.task.exception()!r}"
            return
        if self.driver.sound is not self.was_sound:
            self.was_sound, self.sound_since = self.driver.sound, self.loop.time()
        for uuid in [u for u, need in self.needs.items() if need.until <= self.loop.time()]:
            del self.needs[uuid]
        for uuid in [u for u in UUIDS if self._is_known_to_refuse(u)]:
            self._must_not_serve(uuid, Need(float("inf"), frozenset({"reset"})))
        for number, stream in enumerate(self.streams):
            if stream.task.done():
                yield f"I8: stream {number} ended: {stream.task.exception()!r}"
            yield from self._of_stream(stream)
        if len({stream.frames[-1] for stream in self.streams if stream.frames}) > 1:
            yield "I4: the streams do not all have the newest list"
        self.needed = dict(self.needs)

    def _of_stream(self, stream: GpuStream) -> Iterator[str]:
        if any(first == second for first, second in itertools.pairwise(stream.frames)):
            yield "I4: the same list was sent twice"
        if not stream.frames:
            return
        listed = ListAndWatchResponse.parse(stream.frames[-1]).devices
        pairs = [one.id.rpartition("-") for one in listed]
        order = [(uuid, int(number)) for uuid, _, number in pairs]
        if order != sorted(set(order)) or len(stream.frames[-1]) > LIST_BYTES:
            yield "I5: the list is not sorted, has repeated ids, or is too long"
        told: dict[str, set[str]] = {}
        for one, (uuid, _, _) in zip(listed, pairs, strict=True):
            told.setdefault(uuid, set()).add(one.health)
        kept = {u for u, need in self.needs.items() if self.needed.get(u) is need}
        for uuid in sorted(kept & set().union(*map(_served, stream.frames[stream.looked_at :]))):
            yield f"I9: {uuid} was served for a moment although {self.needs[uuid]}"
        stream.looked_at = len(stream.frames)
        yield from (
            f"I4: slices of {u} do not agree" for u, found in told.items() if len(found) > 1
        )
        for uuid in UUIDS:
            if "Healthy" in told.get(uuid, set()):
                yield from self._served_wrongly(uuid)

    def _served_wrongly(self, uuid: GpuUuid) -> Iterator[str]:
        if uuid in self.needs:
            yield f"I9: {uuid} is served although {self.needs[uuid]}"
        lost = self.lost_since.get(uuid, float("inf"))
        since = max(lost, self.heard_since, self.sound_since)
        # Where all that were well fail alike, the driver does, and has that time to answer again.
        known = self.known(uuid)
        alike = HEALTH.driver_hang if known and known.silent else 0.0
        if self.driver.sound and self.loop.time() - since > NOTICED + alike:
            yield f"I9: {uuid} is served although it was lost at {since}"
        failing = self.failing_since.get(uuid, float("inf"))
        since = max(failing, self.heard_since, self.sound_since)
        if self.driver.sound and self.loop.time() - since > NOTICED + alike:
            yield f"I9: {uuid} is served although its probes fail since {since}"

    def _is_known_to_refuse(self, uuid: GpuUuid) -> bool:
        since = max(self.failing_since.get(uuid, float("inf")), self.heard_since, self.sound_since)
        is_noticed = self.driver.sound and self.loop.time() - since > NOTICED
        return is_noticed and uuid in self.refusing

    def can_be_shaken(self, uuid: GpuUuid) -> bool:
        """Whether the GPU is well, has not failed lately, and nothing else is the matter."""
        known = self.known(uuid)
        since_failed = self.loop.time() - self.failed_at.get(uuid, float("-inf"))
        return (
            self.driver.sound
            and known is not None
            and known.condition is Condition.OK
            and self.driver.outcomes.get(uuid, ProbeOutcome.PASSED) is ProbeOutcome.PASSED
            and self.driver.told_of(uuid).recovery in {None, RecoveryAction.NONE}
            and not self.driver.told_of(uuid).rows_failed
            and since_failed > HEALTH.quiet
        )

    @property
    def lists(self) -> int:
        """How many lists the newest stream has had."""
        return len(self.streams[-1].frames)

    @property
    def healthy(self) -> dict[GpuUuid, bool]:
        """Which GPUs the newest stream's kubelet gives out."""
        listed = ListAndWatchResponse.parse(self.streams[-1].frames[-1]).devices
        return {
            uuid: any(one.health == "Healthy" and one.id.startswith(f"{uuid}-") for one in listed)
            for uuid in UUIDS
        }


def _served(frame: bytes) -> set[GpuUuid]:
    listed = ListAndWatchResponse.parse(frame).devices
    return {GpuUuid(one.id.rpartition("-")[0]) for one in listed if one.health == "Healthy"}


# What may happen, one rule each.

SETTLED = 0.3
"""Seconds after which what happened has reached disk and streams."""

gpus = st.sampled_from(UUIDS)
pauses = st.sampled_from((SETTLED, SETTLED, 1.5, 12.0, 70.0))
numbers = st.sampled_from(
    (1, 13, 31, 45, 48, 48, 54, 63, 64, 79, 92, 94, 95, 119, 140, 145, 151, 54321, None)
)
ERRORS: dict[str, tuple[AgentError, ...]] = {
    "scan": (NO_ANSWER, DriverMissing("no library")),
    "probe": (NO_ANSWER, DriverMissing("no library"), GpuError(UUIDS[0], "Unknown Error")),
    "events": (NO_ANSWER,),
}


class GpuHistories(OneHistory):
    """One history: a world on a loop of its own."""

    world: GpuWorld | None = None

    @initialize()
    def begin(self) -> None:
        async def build() -> GpuWorld:
            world = GpuWorld(self.loop)
            await world.start_agent()
            await asyncio.sleep(SETTLED)
            return world

        self.world = self.loop.run_until_complete(build())

    def breaches(self) -> list[str]:
        return [*self.world.breaches()]

    @rule(gpu=gpus, number=numbers, pause=pauses)
    def an_xid(self, gpu, number, pause) -> None:
        self.after(pause, partial(self.world.report, DriverEvent(EventKind.XID, gpu, number)))

    @rule(number=numbers, stranger=st.booleans(), pause=pauses)
    def an_xid_of_nobody(self, number, stranger, pause) -> None:
        uuid = a_uuid(99) if stranger else None
        self.after(pause, partial(self.world.report, DriverEvent(EventKind.XID, uuid, number)))

    @rule(pause=pauses)
    def a_memory_error_of_nobody(self, pause) -> None:
        # A well one may be out, after a short absence that only the next scan ends.
        healthy = self.world.healthy
        was = {u for u in UUIDS if healthy[u] and self.world.can_be_shaken(u)}
        unnamed = DriverEvent(EventKind.ECC_DOUBLE, None)
        self.after(SETTLED, partial(self.world.report, unnamed))
        out = [u for u in was if not self.world.healthy[u]]
        self.require([f"I9: {uuid} is out for an error that names no GPU" for uuid in out])
        self.after(pause)

    @rule(gpu=gpus, kind=st.sampled_from([k for k in EventKind if k != "xid"]), pause=pauses)
    def another_event(self, gpu, kind, pause) -> None:
        self.after(pause, partial(self.world.report, DriverEvent(kind, gpu)))

    @rule(number=st.sampled_from((54, 48, 79)), times=st.sampled_from((1, 50)))
    def all_are_struck_at_once(self, number, times) -> None:
        events = [DriverEvent(EventKind.XID, uuid, number) for uuid in UUIDS] * times
        before, known = self.world.lists, filter(None, map(self.world.known, UUIDS))
        was_lost = any(one.condition is Condition.LOST for one in known)
        self.after(SETTLED, partial(self.world.report, *events))
        # The slices of one that is found missing or back meanwhile change the list, too.
        if self.world.lists > before + 1 and not (was_lost or self.world.driver.taken_out):
            self.require([f"I4: {self.world.lists - before} lists for one mishap"])

    @rule(gpu=gpus, pause=pauses)
    def a_gpu_is_lost(self, gpu, pause) -> None:
        self.after(pause, partial(self.world.lose, gpu))

    @rule(gpu=gpus, pause=pauses)
    def a_gpu_is_taken_out(self, gpu, pause) -> None:
        self.after(pause, partial(self.world.take_out, gpu))

    @rule(gpu=gpus)
    def a_gpu_is_taken_out_and_put_in_again(self, gpu) -> None:
        world = self.world
        if not world.driver.sound or set(world.lost_since) - {gpu}:
            return  # nobody sees that it is missing
        self.after(MISSED, partial(world.take_out, gpu))
        self.after(MISSED, partial(world.restore, gpu))
        known = world.known(gpu)
        if (
            known.needs_reset
            and known.cause in {str(Cause.XID), str(Cause.ECC)}
            and not known.needs_reboot
        ):
            self.require([f"I9: {gpu} needs a reset although it was away"])

    @rule(gpu=gpus, pause=pauses)
    def a_gpu_comes_back(self, gpu, pause) -> None:
        self.after(pause, partial(self.world.restore, gpu))

    @rule(gpu=gpus, pause=pauses)
    def a_gpu_is_reset(self, gpu, pause) -> None:
        self.after(1.0, partial(self.world.lose, gpu))
        self.after(pause, partial(self.world.restore, gpu))

    @rule(gpu=gpus, pause=pauses)
    def a_gpu_is_refused_until_it_is_reset(self, gpu, pause) -> None:
        if gpu not in self.world.lost_since:
            self.after(pause, partial(self.world.refuse, gpu))

    @rule(gpu=gpus, number=numbers, seconds=st.sampled_from((SETTLED, 700.0)))
    def a_refused_gpu_falls_silent_and_is_reset(self, gpu, number, seconds) -> None:
        if gpu in self.world.lost_since:
            return
        self.after(MISSED, partial(self.world.refuse, gpu))
        self.after(seconds, partial(self.world.answer, gpu, ProbeOutcome.SILENT))
        self.after(SETTLED, partial(self.world.report, DriverEvent(EventKind.XID, gpu, number)))
        self.after(MISSED, partial(self.world.answer, gpu, ProbeOutcome.PASSED))

    @rule(
        gpu=gpus,
        outcome=st.sampled_from((ProbeOutcome.FAILED, ProbeOutcome.SILENT, ProbeOutcome.PASSED)),
        pause=pauses,
    )
    def a_gpu_answers_otherwise(self, gpu, outcome, pause) -> None:
        if gpu not in self.world.lost_since:
            self.world.answer(gpu, outcome)
        self.after(pause)

    @rule(gpu=gpus, seconds=st.sampled_from((0.1, 1.0, 3.0)))
    def the_probes_of_a_gpu_hiccup(self, gpu, seconds) -> None:
        is_well = self.world.can_be_shaken(gpu)
        if gpu not in self.world.lost_since:
            self.after(0.0, partial(self.world.answer, gpu, ProbeOutcome.FAILED))
            self.after(seconds, partial(self.world.report, DriverEvent(EventKind.CHANGED)))
            self.after(SETTLED, partial(self.world.answer, gpu, ProbeOutcome.PASSED))
        if is_well and not self.world.healthy[gpu]:
            self.require([f"I9: {gpu} is not served after a hiccup of {seconds} s"])

    @rule(
        gpu=gpus,
        recovery=st.sampled_from((None, *RecoveryAction)),
        rows=st.sampled_from(((None, None), (False, False), (True, False), (True, True))),
        pause=pauses,
    )
    def a_gpu_tells_of_itself(self, gpu, recovery, rows, pause) -> None:
        signs = GpuSigns(rows_pending=rows[0], rows_failed=rows[1], recovery=recovery)
        self.after(pause, partial(self.world.say, gpu, signs))

    @rule(gpu=gpus, why=st.sampled_from(("", "not supported")), pause=pauses)
    def the_events_of_a_gpu_come_or_not(self, gpu, why, pause) -> None:
        self.world.driver.unmonitored[gpu] = why
        self.after(pause)

    @rule(call=st.sampled_from(tuple(ERRORS)), which=st.integers(0, 2), pause=pauses)
    def a_call_fails(self, call, which, pause) -> None:
        errors = ERRORS[call]
        self.world.driver.troubles[call] = errors[which % len(errors)]
        if call == "events":
            self.world.driver.break_events()
        self.after(pause)

    @rule(pause=pauses)
    def calls_work_again(self, pause) -> None:
        self.after(pause, self.world.driver.troubles.clear)

    @rule(seconds=st.sampled_from((1.0, 30.0, 600.0)))
    def the_driver_hangs(self, seconds) -> None:
        self.world.driver.hung = True
        self.after(seconds)
        self.world.driver.hung = False
        self.world.sound_since = self.loop.time()
        self.after(SETTLED)

    @rule(error=st.booleans(), pause=pauses)
    def the_stream_of_events_ends(self, error, pause) -> None:
        driver = self.world.driver
        self.after(pause, driver.break_events if error else driver.end_events)

    @rule(pause=pauses)
    def the_agent_is_killed(self, pause) -> None:
        self.after(pause, self.world.restart_agent)

    @rule(stale=st.booleans(), pause=pauses)
    def the_kubelet_restarts(self, stale, pause) -> None:
        self.after(pause, partial(self.world.open_stream, stale=stale))

    @rule(pause=pauses)
    def the_node_reboots(self, pause) -> None:
        self.after(pause, self.world.reboot)

    @rule(seconds=st.sampled_from((70.0, 700.0, 7300.0)))
    def time_passes(self, seconds) -> None:
        self.after(seconds)

    def teardown(self) -> None:
        """All troubles end. What only needs rest has had it after two hours; a boot mends all."""
        try:
            if self.world is not None and not self.is_broken:
                self.after(HEALTH.longest_quiet + 200.0, self.world.heal)
                self._all_served_but({uuid for uuid, need in self.world.needs.items() if need})
                self.after(60.0, self.world.reboot)
                self._all_served_but(set())
                self.counted["histories"] += 1
        finally:
            self.end()

    def _all_served_but(self, ill) -> None:
        served = {uuid for uuid, is_served in self.world.healthy.items() if is_served}
        stuck = set(UUIDS) - served - ill - self._in_need()
        self.require([f"{uuid} is not served although nothing is wrong" for uuid in stuck])

    def _in_need(self) -> set[str]:
        """GPUs of which the driver once said that they need a reset, and nobody has reset."""
        return {uuid for uuid in UUIDS if (one := self.world.known(uuid)) and one.needs_reset}

    def end(self) -> None:
        if self.world is None:
            return
        if not self.is_broken:
            self.loop.run_until_complete(self.world.kill_agent())
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0.1))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
