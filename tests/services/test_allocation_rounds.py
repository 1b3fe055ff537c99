"""Several containers of a pod are dead after a lost checkpoint: which one does the kubelet mean?"""

import asyncio
import contextlib
import dataclasses
import datetime as dt
from collections.abc import AsyncIterator, Container, Iterator
from typing import ClassVar

import pytest
from typing_extensions import override

from agent.core.errors import Gate, KubeletError, Refusal
from agent.core.holdings import KubeletEpoch
from agent.core.ledger import Ledger, Row
from agent.core.pods import Phase, PodTable, PodUid
from agent.core.state import State
from agent.services.allocation.rounds import FIRST_ADMISSION, ROUND, Rounds
from tests.builders import NOON, a_container, a_row
from tests.services.allocating import EPOCH, G1, G2, NEXT_EPOCH, Desk, a_desk, ids, placed

TEXT = f"{G1},NVIDIA,1000,10:;{G2},NVIDIA,2000,20:;"
NAMES = ("a", "b")
SECOND, HOUR = dt.timedelta(seconds=1), dt.timedelta(hours=1)
SILENT = [KubeletError("no answer")] * 9


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
        containers = tuple(
            dataclasses.replace(
                one, running_id=one.name if one.name in running else None, has_run=True
            )
            for one in self.view.containers
        )
        self.desk.containers.alive = set(running)
        self.desk.see(dataclasses.replace(self.view, phase=Phase.RUNNING, containers=containers))
        self.desk.witness.admit(self.view)

    def say(self, **changes: object) -> None:
        """All containers are dead, and this is what the pod's status says of each."""
        containers = tuple(
            dataclasses.replace(one, has_run=True, **changes)  # type: ignore[arg-type]
            for one in self.view.containers
        )
        self.desk.containers.alive = set()
        self.desk.see(dataclasses.replace(self.view, phase=Phase.RUNNING, containers=containers))
        self.desk.witness.admit(self.view)

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


UNKNOWN = Gate.MANY_PODS_ADMITTED.name


async def test_without_any_refusal_they_are_asked_for_in_their_order():
    async with a_pod_with_dead_containers() as pod:
        assert "a" == await pod.ask()
        pod.desk.witness.admit(pod.view, a=ids(9)[0])

        assert "b" == await pod.ask(8)


async def test_after_a_refusal_without_a_reason_known_neither_is_guessed():
    async with a_pod_with_dead_containers() as pod:
        await asyncio.sleep(60)
        pod.desk.witness.failures = [*SILENT]
        assert Gate.WITNESS_SILENT.name == await pod.ask()
        pod.desk.witness.failures = []

        assert UNKNOWN == await pod.ask()
        await asyncio.sleep(600)
        assert UNKNOWN == await pod.ask()


async def test_after_a_call_that_ran_out_of_time_neither_is_guessed():
    async with a_pod_with_dead_containers() as pod:
        await asyncio.sleep(60)
        pod.desk.witness.delay = 5
        assert Gate.OUT_OF_TIME.name == await pod.ask()
        pod.desk.witness.delay = 0

        assert UNKNOWN == await pod.ask()


async def test_a_kubelet_that_takes_up_its_pods_asks_in_their_order_whatever_was_refused():
    async with a_pod_with_dead_containers() as pod:
        pod.say(running_id="before", started_at=NOON - HOUR)
        pod.desk.witness.failures = [*SILENT]
        assert Gate.WITNESS_SILENT.name == await pod.ask()
        pod.desk.witness.failures = []

        assert "a" == await pod.ask()


async def test_of_a_pod_that_was_started_without_asking_neither_is_guessed_after_a_silence():
    async with a_desk() as desk:
        pod = Pod(desk)
        desk.bind(pod.view)
        pod.say(started_at=NOON - SECOND, stopped_at=NOON)
        desk.witness.failures = [*SILENT]
        assert Gate.WITNESS_SILENT.name == await pod.ask()
        desk.witness.failures = []

        assert UNKNOWN == await pod.ask()


async def test_a_container_that_dies_while_another_waits_for_its_next_try_is_not_mistaken_for_it():
    async with a_pod_with_dead_containers() as pod:
        pod.live("b")
        pod.desk.see(placed(2))
        pod.desk.witness.admit(placed(2))
        assert UNKNOWN == await pod.ask()
        pod.desk.witness.forget(placed(2))
        pod.live()

        assert UNKNOWN == await pod.ask()
        pod.live("b")
        assert "a" == await pod.ask()


async def test_after_a_slow_disk_the_next_one_is_asked_for_and_later_neither_is_guessed():
    async with a_pod_with_dead_containers() as pod:
        pod.desk.disk.gate.clear()
        assert Gate.STATE_UNWRITABLE.name == await pod.ask()
        pod.desk.disk.gate.set()

        assert "b" == await pod.ask()
        await asyncio.sleep(ROUND)
        assert UNKNOWN == await pod.ask()


async def test_an_agent_that_met_the_kubelet_late_does_not_know_what_was_refused_before():
    async with an_agent_that_is_late(60) as late:
        late.live()
        assert UNKNOWN == await late.ask()

        late.live("a")
        assert "b" == await late.ask()


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


async def test_after_a_reboot_with_a_lost_checkpoint_a_late_agent_serves_all_containers_of_a_pod():
    async with an_agent_that_is_late() as pod:
        pod.say(running_id="before", started_at=NOON - HOUR)

        assert "a" == await pod.ask()
        pod.desk.witness.admit(pod.view, a=ids(9)[0])
        assert "b" == await pod.ask(8)


async def test_a_pod_that_ended_before_its_kubelet_began_is_asked_for_in_order():
    async with an_agent_that_is_late() as pod:
        pod.say(started_at=NOON - HOUR, stopped_at=NOON - HOUR)

        assert "a" == await pod.ask()


@pytest.mark.parametrize(
    "told",
    [
        {"running_id": "now", "started_at": NOON - SECOND},
        {"started_at": NOON - HOUR, "stopped_at": NOON - SECOND},
        {"started_at": NOON - HOUR, "stopped_at": NOON - 2 * SECOND},
        {},
    ],
    ids=["it started", "it ended", "it ended in the same second", "it is gone"],
)
async def test_what_lived_under_a_kubelet_before_the_agent_came_may_have_been_refused(told):
    async with an_agent_that_is_late() as pod:
        pod.say(**told)

        assert UNKNOWN == await pod.ask()


async def test_a_refusal_that_a_late_agent_gave_itself_counts_as_for_any_other():
    async with an_agent_that_is_late(60) as pod:
        pod.say(running_id="before", started_at=NOON - HOUR)
        pod.desk.witness.failures = [*SILENT]
        assert Gate.WITNESS_SILENT.name == await pod.ask()
        pod.desk.witness.failures = []

        assert UNKNOWN == await pod.ask()


@pytest.mark.parametrize("running", [(), ("a",), ("b",)])
async def test_a_container_whose_gpu_is_lost_is_not_confused_with_the_other(running):
    async with a_pod_with_dead_containers() as pod:
        inventory = pod.desk.inventory.value
        pod.desk.inventory.set(
            dataclasses.replace(
                inventory, gpus=tuple(gpu for gpu in inventory.gpus if gpu.uuid != G1)
            )
        )
        pod.live(*running)

        first, second = await pod.ask(), await pod.ask(8)

        expected = {(): ("BAD_GPU", UNKNOWN), ("a",): ("b", "b"), ("b",): ("BAD_GPU", "BAD_GPU")}
        assert expected[running] == (first, second)


class Rows(tuple[Row, ...]):
    """Rows that count how often somebody goes through them."""

    __slots__ = ()
    walks: ClassVar[list[None]] = []

    @override
    def __iter__(self) -> Iterator[Row]:
        self.walks.append(None)
        return super().__iter__()


ALONE, OTHER, GONE = PodUid("alone"), PodUid("other"), PodUid("gone")


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    yield Ledger(rows=Rows(a_row(pod_uid=uid) for uid in (ALONE, OTHER)))
    Rows.walks.clear()


def are_in_doubt(doubt: Container[PodUid]) -> list[PodUid]:
    return [uid for uid in (ALONE, OTHER, GONE) if uid in doubt]


async def test_while_nothing_was_refused_no_row_is_looked_at(ledger):
    doubt = Rounds(EPOCH.since).in_doubt(EPOCH, ledger, PodTable())

    assert [] == are_in_doubt(doubt)
    assert [] == Rows.walks


async def test_an_agent_that_came_late_looks_only_for_the_pod_in_question(ledger):
    rounds = Rounds(EPOCH.since + 2 * FIRST_ADMISSION)
    doubt = rounds.in_doubt(EPOCH, ledger, PodTable())
    assert [] == Rows.walks
    assert [ALONE, OTHER] == are_in_doubt(doubt)

    rounds.refused(a_row(pod_uid=ALONE), EPOCH)
    assert [OTHER] == are_in_doubt(rounds.in_doubt(EPOCH, ledger, PodTable()))
    await asyncio.sleep(ROUND)
    assert [ALONE, OTHER] == are_in_doubt(rounds.in_doubt(EPOCH, ledger, PodTable()))


async def test_a_pod_whose_rows_went_is_in_doubt_no_more_even_if_they_come_back(ledger):
    rounds = Rounds(EPOCH.since)
    rounds.doubt([OTHER, GONE], EPOCH)
    rounds.refused(a_row(pod_uid=ALONE), EPOCH)
    await asyncio.sleep(ROUND)
    assert [ALONE, OTHER] == are_in_doubt(rounds.in_doubt(EPOCH, ledger, PodTable()))

    rest = Ledger(rows=(a_row(pod_uid=OTHER),))
    assert [OTHER] == are_in_doubt(rounds.in_doubt(EPOCH, rest, PodTable()))
    assert [OTHER] == are_in_doubt(rounds.in_doubt(EPOCH, ledger, PodTable()))
    assert [] == are_in_doubt(rounds.in_doubt(NEXT_EPOCH, ledger, PodTable()))
