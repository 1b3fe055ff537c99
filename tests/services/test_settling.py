"""What follows an answer or a refusal is done: once, locks first, through outages and restarts."""

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import msgspec
import pytest

from agent.cluster import NodeEvent, Phase, PodTable, PodView
from agent.errors import ApiConflict, ApiForbidden, ApiInvalid, ApiNotFound, ApiThrottled
from agent.kit.cell import Cell
from agent.ledger import Ledger
from agent.settle import PARALLEL, REFUSED_AT_ONCE, REFUSED_EVENT, Settlement
from tests.builders import G1, NOON, a_container, a_lock, a_pod, a_pod_uid, a_row
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import NoChance
from tests.fakes.clock import LoopClock
from tests.services.at_work import at_work

TO_ALLOCATE, PHASE, MUTEX = (
    "hami.io/vgpu-devices-to-allocate",
    "hami.io/bind-phase",
    "hami.io/mutex.lock",
)
GROUPS = f"{G1},NVIDIA,1000,10:;{G1},NVIDIA,2000,20:;"
MESSAGE = "Allocate failed due to rpc error: desc = No. [HA-2004], which is unexpected"
PATIENCE = 30.0
LOCK = a_lock(name="train-0").value
BOTH = ("a", "b")


def placed(number: int = 0, **changes: object) -> PodView:
    """A pod with two containers, being allocated; its name was generated."""
    pod = a_pod(
        uid=a_pod_uid(number),
        name=f"train-{number}",
        containers=[a_container(name=name) for name in BOTH],
        annotations={TO_ALLOCATE: GROUPS, PHASE: "allocating"},
    )
    return msgspec.structs.replace(pod, **changes)


def refused(number: int = 0, **changes: object) -> PodView:
    """The agent refused the pod."""
    return placed(
        number, phase=Phase.FAILED, reason="UnexpectedAdmissionError", message=MESSAGE, **changes
    )


POD = placed()
NAMED = placed(reusable_name=True)
"""Another pod can have its name."""


class SettlingDesk:
    """What a test of the settlement holds in its hands. `see`: both watches catch up."""

    def __init__(self, *pods: PodView, lock: str = "") -> None:
        self.clock = LoopClock(NOON)
        self.api = FakeApi()
        self.api.create_node({MUTEX: lock} if lock else {})
        for pod in pods:
            self.api.put_pod(pod)
        self.pods: Cell[PodTable] = Cell(PodTable(synced=True))
        self.held: Cell[str | None] = Cell(None)
        self.ledger: Cell[Ledger] = Cell(Ledger())
        self.said: list[NodeEvent] = []
        self.see()
        self.settlement = Settlement(
            pods=self.pods,
            lock=self.held,
            ledger=self.ledger,
            node_api=self.api,
            pod_api=self.api,
            say=self.said.append,
            clock=self.clock,
            chance=NoChance(),
        )

    def see(self) -> None:
        self.follow(pods={pod.uid: pod for pod in self.api.pods.values()})
        self.held.set(self.api.node.annotations.get(MUTEX))

    def follow(self, **changes: object) -> None:
        """What the watch of the pods shows."""
        self.pods.set(msgspec.structs.replace(self.pods.value, **changes))

    def answer(self, pod: PodView, names: Iterable[str] = BOTH, lock: str = "") -> None:
        """These containers are answered now."""
        ledger = self.ledger.value
        for name in names:
            ledger = ledger.put(
                a_row(
                    pod_uid=pod.uid,
                    pod=pod.name,
                    container=name,
                    group=BOTH.index(name),
                    answered_at=self.clock.now(),
                    lock=lock,
                )
            )
        self.ledger.set(ledger)

    def lock(self, stamp: dt.datetime = NOON, name: str = "train-0") -> None:
        self.api.edit_node({MUTEX: a_lock(stamp=stamp, name=name).value})
        self.held.set(self.api.node.annotations.get(MUTEX))

    @property
    def locked(self) -> bool:
        return self.api.node is not None and MUTEX in self.api.node.annotations

    def annotations(self, pod: PodView) -> Mapping[str, str]:
        return self.api.pods[pod.key].annotations


@contextlib.asynccontextmanager
async def a_desk(*pods: PodView, lock: str = "") -> AsyncIterator[SettlingDesk]:
    desk = SettlingDesk(*pods, lock=lock)
    async with at_work(desk.settlement.run):
        yield desk


@pytest.mark.parametrize(
    ("delay", "pause", "more", "writes"),
    [(0.0, 0.95, True, 1), (2.0, 1.5, True, 2), (0.0, 1.1, False, 1)],
    ids=["within the quiet time", "while a patch is under way", "no other one"],
)
async def test_a_pod_is_patched_once_at_a_time_and_once_for_the_answers_of_a_quiet_time(
    delay, pause, more, writes
):
    async with a_desk(POD) as desk:
        desk.api.delay = delay
        desk.answer(POD, ["a"])
        await asyncio.sleep(0.9)
        assert 0 == desk.api.writes
        await asyncio.sleep(pause - 0.9)
        if more:
            desk.answer(POD, ["b"])
        await asyncio.sleep(1)
        assert 1 == desk.api.writes
        await asyncio.sleep(5)

        left = ";;" if more else ";" + GROUPS.partition(";")[2]
        assert (writes, left) == (desk.api.writes, desk.annotations(POD)[TO_ALLOCATE])
        assert more == (desk.annotations(POD)[PHASE] == "success")


async def test_nothing_is_done_before_the_pods_are_known_and_an_answer_of_the_future_is_old():
    """A process before this one answered it, and the clock was set back."""
    desk = SettlingDesk(POD)
    desk.answer(POD, ["a"])
    desk.clock.step(dt.timedelta(hours=-1))
    desk.follow(synced=False)
    async with at_work(desk.settlement.run):
        await asyncio.sleep(60)
        assert 0 == sum(desk.api.calls.values())
        desk.follow(synced=True)
        await asyncio.sleep(1)

        assert desk.annotations(POD)[TO_ALLOCATE].startswith(";")


async def test_a_success_is_not_written_on_a_pod_that_ended_but_a_refusal_is():
    ended = placed(phase=Phase.FAILED)
    async with a_desk(ended, refused(1)) as desk:
        desk.answer(ended)
        await asyncio.sleep(1)

        assert ended.annotations == desk.annotations(ended)
        assert {TO_ALLOCATE: GROUPS, PHASE: "failed"} == desk.annotations(refused(1))


@pytest.mark.parametrize(
    ("error", "is_there"),
    [
        # The API server gives a patch up after some collisions with other writers.
        (ApiConflict("the object has been modified", status=409), True),
        (ApiConflict("the pod is another one", status=409), False),
        (ApiForbidden("no pod of this node", status=403), True),
        (ApiForbidden("no pod of this node", status=403), False),
        (ApiInvalid("a webhook", status=422), True),
        (ApiInvalid("the pod is another one", status=422), False),
        (ApiNotFound("no such pod", status=404), False),
    ],
)
async def test_a_patch_that_fails_is_tried_again_unless_it_never_can_be_applied(error, is_there):
    async with a_desk(POD) as desk:
        desk.api.fail(error)
        desk.api.delay = 0.5
        desk.answer(POD)
        await asyncio.sleep(0.1)
        if not is_there:
            desk.follow(pods={})
        await asyncio.sleep(60)

        assert 1 + is_there == desk.api.calls["annotate_pod"]
        assert ("success" if is_there else "allocating") == desk.annotations(POD)[PHASE]


@pytest.mark.parametrize(
    ("ended", "phase"),
    [
        (placed(phase=Phase.FAILED), "allocating"),
        (placed(phase=Phase.SUCCEEDED), "allocating"),
        (refused(), "failed"),
    ],
    ids=["failed", "succeeded", "refused"],
)
async def test_the_lock_of_a_pod_that_has_ended_goes_behind_a_patch_with_its_uid(ended, phase):
    async with a_desk(ended, lock=LOCK) as desk:
        await asyncio.sleep(30)

        assert (False, 2) == (desk.locked, desk.api.writes)
        assert 1 == desk.api.calls["annotate_pod"]
        assert phase == desk.annotations(ended)[PHASE]

        desk.see()
        await asyncio.sleep(1)
        desk.lock()
        await asyncio.sleep(1)
        assert not desk.locked  # it came back

    async with a_desk(lock=LOCK) as desk:
        desk.follow(pods={ended.uid: ended})
        desk.api.put_pod(placed(7, name=POD.name))
        desk.api.fail(ApiConflict("another UID", status=409), count=99, call="annotate_pod")
        await asyncio.sleep(25)
        assert desk.locked


@pytest.mark.parametrize("found", [None, *Phase])
async def test_a_lock_that_nobody_waits_for_goes_when_it_stood_longer_than_a_bind(found):
    """The watch shows no owner; the API server knows whether there is one after all."""
    async with a_desk(lock=LOCK) as desk:
        if found is not None:
            desk.api.put_pod(placed(phase=found))
        desk.api.fail(ApiThrottled("busy", status=429), count=2, call="get_pod")
        await asyncio.sleep(PATIENCE - 2)
        assert desk.locked

        await asyncio.sleep(20)

        is_owned = found not in {None, Phase.FAILED, Phase.SUCCEEDED}
        assert is_owned == desk.locked
        desk.api.pods.clear()
        await asyncio.sleep(10)
        assert not desk.locked


async def test_each_new_lock_is_given_the_whole_time_and_a_gap_in_the_watch_starts_it_again():
    async with a_desk(lock=LOCK) as desk:
        for step in range(6):
            desk.lock(NOON + dt.timedelta(seconds=step * PATIENCE / 2))
            await asyncio.sleep(PATIENCE / 2)
        for changes in ({"stale": True}, {"synced": False}):
            desk.follow(**changes)
            await asyncio.sleep(100)
            desk.follow(stale=False, synced=True)
            await asyncio.sleep(PATIENCE - 5)
            assert desk.locked

        await asyncio.sleep(10)

        assert not desk.locked


async def test_a_server_that_names_a_time_is_left_alone_until_then():
    async with a_desk(NAMED) as desk:
        desk.api.throttle(1, retry_after=20.0)
        desk.answer(NAMED)
        await asyncio.sleep(19.9)
        assert 1 == desk.api.writes

        await asyncio.sleep(0.2)

        assert (2, "success") == (desk.api.writes, desk.annotations(NAMED)[PHASE])


async def test_a_lock_waits_behind_no_patches_of_refused_pods_although_they_hang():
    pods = [refused(n, namespace=f"team-{n}") for n in range(1, 40)]
    async with a_desk(POD, *pods, lock=LOCK) as desk:
        desk.api.delay = 3.0
        await asyncio.sleep(1)
        assert PARALLEL - 1 == desk.api.calls["annotate_pod"]
        desk.answer(POD, lock=LOCK)
        await asyncio.sleep(3.1)
        assert not desk.locked

        await asyncio.sleep(60)
        assert len(pods) + 1 == desk.api.calls["annotate_pod"]


@pytest.mark.parametrize(
    "error", [ApiInvalid("a webhook", status=422), ApiNotFound("no", status=404)]
)
async def test_a_patch_that_is_refused_for_a_pod_that_is_there_is_tried_again_and_hides_no_other(
    monkeypatch, error
):
    pods = [refused(n) for n in range(1, REFUSED_AT_ONCE + 1)]
    async with a_desk(*pods) as desk:
        annotate = desk.api.annotate_pod

        async def refuse(namespace: str, name: str, *rest: Any) -> None:
            if name != pods[-1].name and desk.clock.now() < NOON + dt.timedelta(minutes=20):
                raise error
            await annotate(namespace, name, *rest)

        monkeypatch.setattr(desk.api, "annotate_pod", refuse)
        await asyncio.sleep(5)
        assert "failed" == desk.annotations(pods[-1])[PHASE]
        await asyncio.sleep(10 * 60)
        assert "allocating" == desk.annotations(pods[0])[PHASE]

        await asyncio.sleep(11 * 60)
        assert {"failed"} == {desk.annotations(pod)[PHASE] for pod in pods}
        assert len(pods) == len(desk.said)


async def test_an_event_is_posted_on_a_refused_pod_once_it_is_noted():
    async with a_desk(POD, refused(1)) as desk:
        desk.answer(POD, lock=LOCK)
        await asyncio.sleep(2)
        desk.see()
        await asyncio.sleep(3600)

        assert [
            NodeEvent(REFUSED_EVENT, "No. [HA-2004]", True, "team-a", "train-1", a_pod_uid(1))
        ] == desk.said
