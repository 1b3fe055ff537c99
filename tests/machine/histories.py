"""The rules of random histories: one step each, and how much time passes after it."""

import dataclasses
from collections.abc import Callable
from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from agent.model import Condition
from agent.sandbox.store import Json
from tests.builders import NODE
from tests.machine.audit import uid_of
from tests.machine.playing import Deed, OneHistory
from tests.machine.pods import Box, Shape, boxes, plain_shapes, shapes
from tests.machine.refusals import left_over
from tests.machine.sides import VirtualClock
from tests.machine.world import MachineWorld

names = st.sampled_from(("a", "b", "c", "d", "e"))
picks = st.integers(0, 5)
pauses = st.sampled_from((0.0, 0.01, 0.05, 0.3, 1.5))
flags = st.booleans()
often = st.sampled_from((True, True, True, False))
seldom = st.sampled_from((False, False, False, True))


class Histories(OneHistory):
    """One history: a world on a loop of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.world: MachineWorld | None = None

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        running=st.lists(st.one_of(plain_shapes, shapes), max_size=3),
    )
    def begin(self, seed: int, running: list[Shape]) -> None:
        """A node on which some pods run already."""

        async def build() -> MachineWorld:
            return MachineWorld(seed, VirtualClock(self.loop))

        self.world = self.loop.run_until_complete(build())
        self._living = self.world.living()
        self.loop.run_until_complete(self._living.__aenter__())
        self.world.late_registrations = 0.1
        for name, shape in zip(("a", "b", "c"), running, strict=False):
            self.after(1.0, partial(self.world.create_and_schedule, name, shape))

    def breaches(self) -> list[str]:
        if self.world.task.done():
            self.is_broken = True
            self.world.task.result()
        return [*self.world.audit.breaches]

    def write(self, pause: float, deed: Deed) -> None:
        """A step that needs the API server: while that is away, nobody can take it."""
        self.after(pause, None if self.world.is_api_away else deed)

    def pick(self, place: int, wanted: Callable[[Json], bool] = lambda _: True) -> Json | None:
        if self.world.is_api_away:
            return None
        found = [pod for pod in self.world.pods() if wanted(pod)]
        return found[place % len(found)] if found else None

    @rule(count=st.integers(1, 3), shape=plain_shapes)
    def pods_run(self, count: int, shape: Shape) -> None:
        """What goes on all day: a few pods are placed one after the other, and start."""
        for name in ("p", "q", "r", "s", "t")[:count]:
            self.write(0.7, partial(self.world.create_and_schedule, name, shape))

    @rule(name=names, shape=shapes, at_once=often, pause=pauses)
    def a_pod_is_created(self, *, name: str, shape: Shape, at_once: bool, pause: float) -> None:
        create = self.world.create_and_schedule if at_once else self.world.create
        self.write(pause, partial(create, name, shape))

    @rule(place=picks, pause=pauses)
    def a_pod_is_scheduled(self, place: int, pause: float) -> None:
        pod = self.pick(place, lambda pod: not pod["spec"].get("nodeName"))
        self.after(pause, None if pod is None else partial(self.world.schedule, uid_of(pod)))

    @rule(name=names, shape=shapes, is_static=seldom, pause=pauses)
    def a_pod_comes_unplaced(
        self, *, name: str, shape: Shape, is_static: bool, pause: float
    ) -> None:
        create = self.world.create_static if is_static else self.world.create_stray
        self.write(pause, partial(create, name, shape))

    @rule(place=picks, grace=st.sampled_from((0, 1, 30)), pause=pauses)
    def a_pod_is_deleted(self, place: int, grace: int, pause: float) -> None:
        pod = self.pick(place)
        self.after(pause, None if pod is None else partial(self.world.delete, pod, grace))

    @rule(
        place=picks, shape=st.one_of(shapes, plain_shapes), pause=st.sampled_from((0.0, 0.3, 1.5))
    )
    def a_pod_is_created_anew(self, place: int, shape: Shape, pause: float) -> None:
        pod = self.pick(place)
        self.after(pause, None if pod is None else partial(self.world.create_anew, pod, shape))

    @rule(
        place=picks,
        amounts=st.sampled_from(("1,0", "1,0", "1,1", "0,0", "16000,100", "12000,0")),
        pause=pauses,
    )
    def a_tenant_lies(self, place: int, amounts: str, pause: float) -> None:
        """The GPU may seem empty then, and the next pod is placed on it."""
        pod = self.pick(place, is_bound)
        self.after(pause, None if pod is None else partial(self.world.lie, pod, amounts))
        self.write(0.7, partial(self.world.create_and_schedule, "v", Shape((Box(mib=12000),))))

    @rule(is_pods=flags, frames=st.sampled_from((0, 0, 1, 2, 5)), pause=pauses)
    def a_watch_lags(self, *, is_pods: bool, frames: int, pause: float) -> None:
        """So many more frames arrive, and then none."""
        faults = self.world.faults
        self.after(pause, partial((faults.pods if is_pods else faults.node).hold, frames))

    @rule(pause=pauses)
    def the_watches_catch_up(self, pause: float) -> None:
        self.after(pause, self.world.faults.catch_up)

    @rule(trouble=st.sampled_from(("", "down", "no list", "alone")), pause=pauses)
    def the_api_server_changes(self, trouble: str, pause: float) -> None:
        change = partial(
            self.world.faults.change,
            is_down=trouble in ("down", "alone"),
            list_fails=trouble == "no list",
            is_alone=trouble == "alone",
        )
        self.after(pause, change)

    @rule(
        place=picks,
        shape=st.one_of(shapes, plain_shapes),
        lose=st.sampled_from((None, False, True)),
        ends=often,
        pause=st.sampled_from((0.3, 1.5, 3.0)),
    )
    def a_namesake_comes_while_the_agent_alone_hears_nothing(
        self, *, place: int, shape: Shape, lose: bool | None, ends: bool, pause: float
    ) -> None:
        """`lose`: a new kubelet meanwhile, with or without the records of the last.

        `ends`: the agent hears again afterwards.
        """
        pod = self.pick(place, is_bound)
        if pod is None:
            return
        alone = partial(self.world.faults.change, is_down=True, list_fails=False, is_alone=True)
        self.after(0.0, alone)
        if lose is not None:
            self.after(1.5, partial(self.world.restart_kubelet, lose=lose))
        self.after(pause, partial(self.world.create_anew, pod, shape))
        if ends:
            self.after(0.0, self.world.faults.clear)

    @rule(
        name=names,
        first=boxes,
        shape=st.one_of(shapes, plain_shapes),
        call=st.sampled_from((1, 2, 2)),
        late=st.sampled_from((0.0, 1.0, 2.0, 4.0)),
    )
    def a_namesake_comes_after_another_plugin_refused(
        self, *, name: str, first: Box, shape: Shape, call: int, late: float
    ) -> None:
        """`call`: the call that was refused; the watch of the pods is so late."""
        kind = "init" if first.kind == "app" else first.kind
        two = Shape((dataclasses.replace(first, kind=kind), Box(mib=2000)))
        self.after(0.0, partial(setattr, self.world.kubelet.drive, "refused_elsewhere", call))
        self.write(0.7, partial(self.world.create_and_schedule, name, two))
        pod = self.pick(0, lambda pod: pod["metadata"]["name"] == name)
        if pod is None:
            return
        self.after(0.3, partial(self.world.faults.pods.hold, 0))
        self.after(late, partial(self.world.create_anew, pod, shape))
        self.after(0.5, self.world.faults.catch_up)

    @rule(pause=pauses)
    def the_kubelet_dies_after_the_next_answer(self, pause: float) -> None:
        self.after(pause, self.world.die_after_answer)

    @rule(lose=flags, pause=pauses)
    def the_kubelet_restarts(self, *, lose: bool, pause: float) -> None:
        self.after(pause, partial(self.world.restart_kubelet, lose=lose))

    @rule(seconds=st.sampled_from((1.0, 3.0, 70.0)), pause=pauses)
    def the_kubelet_is_away(self, seconds: float, pause: float) -> None:
        self.after(pause, partial(self.world.stop_kubelet, seconds))

    @rule(lose=flags, pause=pauses)
    def the_node_reboots(self, *, lose: bool, pause: float) -> None:
        self.after(pause, partial(self.world.reboot, lose=lose))

    @rule(place=picks, count=st.sampled_from((1, 1, 2, 6)), pause=pauses)
    def containers_die(self, place: int, count: int, pause: float) -> None:
        self.after(pause, partial(self.world.end_containers, place, count))

    @rule(count=st.sampled_from((1, 2, 6)), pause=pauses)
    def containers_die_after_a_lost_checkpoint(self, count: int, pause: float) -> None:
        self.after(1.5, partial(self.world.restart_kubelet, lose=True))
        self.after(pause, partial(self.world.end_containers, 0, count))

    @rule(
        lose=often,
        place=picks,
        before=st.sampled_from((0, 1, 1, 2)),
        after=st.lists(st.sampled_from((0.0, 0.1, 0.3, 0.36, 0.5, 0.8, 1.2, 2.5)), max_size=3),
        silent=st.sampled_from((0, 0, 0, 2, 6)),
        pause=pauses,
    )
    def containers_die_around_a_kubelets_start(
        self, *, lose: bool, place: int, before: int, after: list[float], silent: int, pause: float
    ) -> None:
        """Some while no kubelet is there, others so long after its process began."""
        self.after(
            1.0,
            partial(self.world.restart_while_dying, place, before, after, lose=lose, silent=silent),
        )
        self.after(pause)

    @rule(
        steps=st.sampled_from((0, 1, 2, 3, 5, 8)),
        seconds=st.sampled_from((0.2, 0.2, 3.0)),
        pause=pauses,
    )
    def the_agent_is_killed(self, steps: int, seconds: float, pause: float) -> None:
        self.after(pause, partial(self.world.kill_agent_at, steps, seconds))

    @rule(place=picks, deed=st.sampled_from(("expire", "stamp", "bind")), pause=pauses)
    def the_scheduler_errs(self, place: int, deed: str, pause: float) -> None:
        """Its locks run out, are stamped anew, or a bind that had succeeded is tried again."""
        pod = self.pick(place, is_bound)
        scheduler, spawn = self.world.scheduler, self.world.spawn
        deeds: dict[str, Deed] = {
            "expire": scheduler.clock.jump,
            "stamp": lambda: spawn(scheduler.stamp_again()),
        }
        if pod is not None:
            deeds["bind"] = lambda: spawn(scheduler.bind_again(uid_of(pod)))
        self.after(pause, deeds.get(deed))

    @rule(calls=st.sampled_from((5, 10, 60)), pause=pauses)
    def others_ask_pod_resources(self, calls: int, pause: float) -> None:
        self.after(pause, partial(self.world.crowd, calls))

    @rule(calls=st.sampled_from((1, 3, 9)), pause=pauses)
    def pod_resources_fails(self, calls: int, pause: float) -> None:
        self.after(pause, partial(setattr, self.world.host.trouble, "silent", calls))

    @rule(write=st.sampled_from((0.0, 0.3, 0.9)), pause=pauses)
    def the_disk_slows_down(self, write: float, pause: float) -> None:
        self.after(pause, partial(setattr, self.world.host.trouble, "write", write))

    @rule(
        place=st.integers(0, 1),
        condition=st.sampled_from((Condition.OK, Condition.OK, Condition.BAD, Condition.LOST)),
        pause=pauses,
    )
    def a_gpu_changes(self, place: int, condition: Condition, pause: float) -> None:
        self.after(pause, partial(self.world.set_gpu, place, condition))

    @rule(split=st.sampled_from((1, 2, 4)), pause=pauses)
    def the_split_count_changes(self, split: int, pause: float) -> None:
        self.after(pause, partial(self.world.set_split, split))

    @rule(seconds=st.sampled_from((3.0, 12.0, 70.0)))
    def time_passes(self, seconds: float) -> None:
        self.after(seconds)

    def teardown(self) -> None:
        """All troubles end; five minutes later everything must be in order."""
        try:
            if self.world is not None and not self.is_broken:
                self.after(310.0, self.world.heal)
                self.require(list(left_over(self.world, self.world.refusals.right)))
                self.count()
        finally:
            self.end()

    def count(self) -> None:
        """What was answered, refused and excused in this history, by kind."""
        counted, audit = type(self).counted, self.world.audit
        counted["histories"] += 1
        counted["answers"] += audit.answered_calls
        counted.update({f"excused: {kind}": n for kind, n in audit.excuses.items()})
        counted.update({f"refused: {kind}": n for kind, n in self.world.refusals.counted.items()})

    def end(self) -> None:
        if self.world is not None:
            self.loop.run_until_complete(self._living.__aexit__(None, None, None))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


def is_bound(pod: Json) -> bool:
    """Whether it is a pod of this node."""
    return bool(pod["spec"].get("nodeName") == NODE)
