"""A container that was answered before gets the same bytes again."""

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec
import pytest

from agent.cluster import Phase
from agent.errors import Refusal, RefusalReason
from agent.ledger import KubeletEpoch, State
from tests.builders import NOON, a_container
from tests.services.allocation.allocating import G1, G2, NEXT_EPOCH, Desk, a_desk, ids, placed


async def answered(desk, pod):
    """The pod was given its GPU; the kubelet lost its record of it and was restarted."""
    desk.bind(pod)
    edits = await desk.service.allocate(ids(4))
    desk.lock(None)
    desk.epoch = NEXT_EPOCH
    return edits


async def test_the_answer_is_equal_and_the_directory_is_left_as_it_is():
    async with a_desk() as desk:
        pod = placed(1)
        first = await answered(desk, pod)

        again = await desk.service.allocate(ids(9))

        assert first == again
        assert 1 == desk.hooks.wiped[f"{pod.uid}_main"]
        assert 2 == desk.hooks.made[f"{pod.uid}_main"]
        assert {("ok", ""): 1, ("replay", ""): 1} == desk.results


async def test_the_row_takes_the_ids_and_the_epoch_of_the_new_kubelet():
    async with a_desk() as desk:
        await answered(desk, placed(1))
        booked = msgspec.structs.replace(desk.ledger.rows[0], confirmed=True)
        await desk.state.commit(lambda ledger: ledger.put(booked))
        await asyncio.sleep(90)

        await desk.service.allocate(ids(9))

        (row,) = desk.ledger.rows
        assert (ids(9), NEXT_EPOCH, False) == (row.slice_ids, row.epoch, row.confirmed)
        assert desk.clock.now() == row.answered_at


# Several containers of a pod are dead after a lost checkpoint: which one does the kubelet mean?
#
# It starts them in the order of the spec, beside its other work, goes on behind one that was
# refused, and comes back to that one later. At a pod's admission alone the order is certain.


TEXT = f"{G1},NVIDIA,1000,10:;{G2},NVIDIA,2000,20:;"
NAMES = ("a", "b")
SECOND, HOUR = dt.timedelta(seconds=1), dt.timedelta(hours=1)


class Pod:
    """A pod that ran, and what its containers were answered; the kubelet lost its records."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        containers = tuple(a_container(name=name) for name in NAMES)
        self.view = placed(1, TEXT, containers=containers)
        self.answers: dict[str, object] = {}

    async def start(self) -> None:
        desk = self.desk
        desk.bind(self.view)
        self.answers["a"] = await desk.service.allocate(ids(1))
        desk.witness.admit(self.view, a=ids(1)[0])
        self.answers["b"] = await desk.service.allocate(ids(2, gpu=1))
        desk.lock(None)
        desk.epoch = NEXT_EPOCH
        self.live()

    def live(self, *running: str) -> None:
        """These run, the others are dead; the kubelet knows the pod without any ids."""
        self._show(set(running), lambda name: {"running_id": name if name in running else None})

    def say(self, **changes: object) -> None:
        """All containers are dead, and this is what the pod's status says of each."""
        self._show(set(), lambda _: changes)

    def _show(self, alive: set[str], said: Callable[[str], Mapping[str, object]]) -> None:
        containers = tuple(
            msgspec.structs.replace(one, has_run=True, **said(one.name))
            for one in self.view.containers
        )
        self.desk.containers.alive = alive
        self.desk.admit(
            msgspec.structs.replace(self.view, phase=Phase.RUNNING, containers=containers)
        )

    async def ask(self, number: int = 9) -> str:
        """The container whose answer is given, or the gate that closed."""
        try:
            edits = await self.desk.service.allocate(ids(number))
        except Refusal as refusal:
            return refusal.gate.name
        return next(name for name, answer in self.answers.items() if answer == edits)


@contextlib.asynccontextmanager
async def a_pod_with_dead_containers() -> AsyncIterator[Pod]:
    async with a_desk() as desk:
        pod = Pod(desk)
        await pod.start()
        yield pod


UNKNOWN = RefusalReason.MANY_PODS_ADMITTED.name


@pytest.mark.parametrize("late", [True, False], ids=["the status is late", "the status says so"])
async def test_of_two_that_died_under_this_kubelet_neither_is_guessed_until_one_lives(late):
    async with a_pod_with_dead_containers() as pod:
        await asyncio.sleep(60)
        if late:
            pod.say(running_id="before", started_at=NOON - HOUR)
        else:
            pod.live()

        assert UNKNOWN == await pod.ask()
        assert UNKNOWN == await pod.ask(8)
        pod.live("a")
        assert "b" == await pod.ask()


async def test_a_container_runs_as_its_status_says_where_no_cgroup_tells():
    async with a_pod_with_dead_containers() as pod:
        await asyncio.sleep(60)
        pod.live("a")
        pod.desk.containers.alive = None

        assert "b" == await pod.ask()


@contextlib.asynccontextmanager
async def an_agent_that_is_late(seconds: int = 2) -> AsyncIterator[Pod]:
    """It starts so long after the kubelet, which has lost its records; all containers are dead."""
    async with a_pod_with_dead_containers() as pod:
        ledger, disk, answers = pod.desk.ledger, pod.desk.disk, pod.answers
    async with a_desk(State(generation=1, ledger=ledger), disk) as desk:
        late = Pod(desk)
        late.answers = answers
        desk.epoch = KubeletEpoch(7, NEXT_EPOCH.ctime_ns - seconds * 10**9)
        yield late


@pytest.mark.parametrize("late", [0, 2])
async def test_after_a_reboot_with_a_lost_checkpoint_an_agent_that_was_there_serves_in_order(late):
    async with an_agent_that_is_late(late) as pod:
        pod.desk.containers.pods = frozenset()
        pod.say(running_id="before", started_at=NOON - HOUR)
        await asyncio.sleep(0.1)

        if late:  # the kubelet may have admitted the pod without asking
            assert UNKNOWN == await pod.ask()
            return
        assert "a" == await pod.ask()
        pod.desk.witness.admit(pod.view, a=ids(9)[0])
        assert "b" == await pod.ask(8)
