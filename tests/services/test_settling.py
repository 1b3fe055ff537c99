"""What follows an answer or a refusal is done: once, locks first, through outages and restarts."""

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
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
from tests.services.at_work import at_work, scenarios

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


PODS = {
    "pod": POD,
    "named": NAMED,
    "failed": placed(phase=Phase.FAILED),
    "succeeded": placed(phase=Phase.SUCCEEDED),
    "refused": refused(),
    "refused-1": refused(1),
    "unseen": None,
}
ERRORS = {
    "403": ApiForbidden("no pod of this node", status=403),
    "404": ApiNotFound("no such pod", status=404),
    "409": ApiConflict("the object has been modified", status=409),
    "422": ApiInvalid("a webhook", status=422),
    "429": ApiThrottled("busy", status=429),
    "429/20": ApiThrottled("busy", status=429, retry_after=20.0),
}


async def do(desk: SettlingDesk, word: str) -> None:
    """`+5`: 5 s pass. `answers=ab`: these containers are answered, under the lock if there is one.

    `fail=409`: so does the next patch; `get-fails=429x2`: so do the next GETs of a pod.
    `appears=Running`: so is the pod at the API server, which no watch shows; `is-another`: its name
    is another one's. `locks`: the scheduler stamps another lock; `lock-is-back`: the first.
    """
    verb, _, what = word.partition("=")
    if word.startswith("+"):
        await asyncio.sleep(float(word))
    elif verb == "answers":
        held = desk.api.node.annotations.get(MUTEX, "") if desk.api.node else ""
        desk.answer(POD, what, lock=held)
    elif verb == "appears":
        desk.api.put_pod(placed(phase=Phase(what)))
    elif verb == "get-fails":
        error, _, count = what.partition("x")
        desk.api.fail(ERRORS[error], count=int(count), call="get_pod")
    elif verb == "fail":
        desk.api.fail(ERRORS[what], call="annotate_pod")
    elif verb == "delay":
        desk.api.delay = float(what)
    elif verb == "locks":
        desk.lock(desk.clock.now())
    else:
        deeds: dict[str, Callable[[], object]] = {
            "both-watches-see": desk.see,
            "lock-is-back": desk.lock,
            "is-gone": lambda: desk.follow(pods={}),
            "vanishes": desk.api.pods.clear,
            "is-another": lambda: desk.api.put_pod(placed(7, name=POD.name)),
            "clock-back": lambda: desk.clock.step(dt.timedelta(hours=-1)),
            "unsynced": lambda: desk.follow(synced=False),
            "synced": lambda: desk.follow(synced=True),
            "stale": lambda: desk.follow(stale=True),
            "fresh": lambda: desk.follow(stale=False),
        }
        deeds[verb]()


def told(desk: SettlingDesk) -> str:
    """What the API server holds, and what it was asked for."""
    calls = desk.api.calls
    parts = ["locked" if desk.locked else "free"]
    for pod in desk.api.pods.values():
        left = pod.annotations[TO_ALLOCATE]
        groups = {GROUPS: "both wait", ";;": "none waits"}.get(left, "one waits")
        parts.append(f"{pod.name}: {pod.annotations[PHASE]}, {groups}")
    counts = (calls["annotate_pod"], calls["release_lock"], calls["get_pod"])
    parts.append("patches {}, releases {}, gets {}".format(*counts))
    return " | ".join([*parts, *(event.reason for event in desk.said)])


SCENARIOS = scenarios("settling_scenarios.txt")


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_what_is_owed_is_done_as_it_is_told(scenario):
    first, *words = scenario.split()
    found = [PODS[name] for name in first.split(",") if name != "lock"]
    lock = LOCK if "lock" in first.split(",") else ""
    async with a_desk(*filter(None, found), lock=lock) as desk:
        for word in words:
            await do(desk, word)
        assert SCENARIOS[scenario] == told(desk)


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
