"""A driver of which each call may fail or hang, and each GPU may be lost, silent or wrong."""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec

from agent.app.agent import NodeAgent
from agent.errors import AgentError, DriverError, GpuError, StateError
from agent.health.judge import HealthSettings
from agent.kubelet.door import PluginServer
from agent.model import (
    LIST_BYTES,
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
        async with at_work(front.state.run, front.discovery.run, front.health.run):
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
