"""Random histories of the driver: whatever it does, the kubelet is told the truth of each GPU.

Invariants: after a change each stream has the one newest list, in which the slices of a GPU agree
(I4); lists are sorted, without repeated ids and of bounded size (I5); nothing that the driver does
ends the agent (I8); what is known to be bad stays so over restarts of agent and kubelet until a
rule clears it, and no hiccup of the probes takes a well GPU away (I9). When all troubles end, every
GPU is served again.
"""

import asyncio
from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from agent.errors import AgentError, DriverMissing, GpuError
from agent.model import (
    Cause,
    Condition,
    DriverEvent,
    EventKind,
    GpuSigns,
    ProbeOutcome,
    RecoveryAction,
)
from tests.builders import a_uuid
from tests.machine.driver import HEALTH, MISSED, NO_ANSWER, UUIDS, GpuWorld
from tests.machine.playing import OneHistory

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
